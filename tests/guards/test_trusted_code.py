"""Tests of guards/trusted_code.py: only Python's, torch's, JAX's, NumPy's and dynaxla's code is trusted not to change."""

from __future__ import annotations

import collections
import functools
import json
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch

import dynaxla
from dynaxla.guards import trusted_code
from dynaxla.guards.state_changes import StateChangeDetector
from dynaxla.training import compile_step


def function() -> None: ...


class Kind:
    pass


@pytest.mark.parametrize("module", [torch, torch.nn.functional, torch.ops.aten, jax, np, json, dynaxla], ids=lambda module: module.__name__)
def test_trusted_modules(module: types.ModuleType) -> None:
    assert trusted_code.is_trusted_module(module)


def test_other_modules() -> None:
    assert not trusted_code.is_trusted_module(pytest)
    assert not trusted_code.is_trusted_module(types.ModuleType("torch")), "a name is not enough"


def test_functions() -> None:
    assert trusted_code.is_trusted_function(json.dumps)
    assert not trusted_code.is_trusted_function(function)
    assert not trusted_code.is_trusted_function(functools.wraps(json.dumps)(lambda: None)), "wraps copies names"


def test_classes() -> None:
    assert all(map(trusted_code.is_trusted_class, (int, collections.OrderedDict, torch.nn.Linear, np.ndarray)))
    assert not trusted_code.is_trusted_class(Kind)
    scope: dict[str, Any] = {}
    exec("class Nameless: pass", scope)
    assert scope["Nameless"].__module__ == "builtins"
    assert not trusted_code.is_trusted_class(scope["Nameless"])


def test_files() -> None:
    assert trusted_code.is_trusted_file(json.__file__)
    assert trusted_code.is_trusted_file("<frozen importlib._bootstrap>")
    assert not trusted_code.is_trusted_file(__file__)
    installed = str(Path(json.__file__).parents[1] / "site-packages" / "timm" / "layers.py")
    assert not trusted_code.is_trusted_file(installed)
    assert trusted_code.is_installed_file(installed)


class Meta(type):
    """Defines `__module__` for its classes, as Cython's metaclass does, and thereby hides its own."""

    __module__: Any = property(lambda kind: "somewhere")


class ClassOfMeta(metaclass=Meta):
    pass


def test_classes_whose_metaclass_defines_their_module() -> None:
    assert not isinstance(Meta.__module__, str)
    assert (trusted_code.module_of(Meta), trusted_code.module_of(ClassOfMeta)) == ("", "somewhere")
    step = dynaxla.compile_step(lambda x: x * (2 if isinstance(ClassOfMeta(), ClassOfMeta) and type(ClassOfMeta) is Meta else 3))
    for _ in range(4):
        assert step(torch.ones(2)).tolist() == [2, 2]
    function = dynaxla.to_torch(lambda x: x * (2 if type(ClassOfMeta) is Meta else 3))
    assert torch.compile(lambda x: function(x) + 1, backend="dynaxla", fullgraph=True)(torch.ones(2)).tolist() == [3, 3]


def test_guards_of_a_function_are_not_part_of_it() -> None:
    """A function can reach its own guards, which refer to all objects that it reaches."""
    assert trusted_code.is_own(StateChangeDetector({}))
    assert trusted_code.is_own(compile_step(function))
    assert not trusted_code.is_own(Kind())
