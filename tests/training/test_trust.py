"""Whose code is trusted not to change: Python's, torch's, JAX's, NumPy's and ours, and nobody else's."""

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
from dynaxla.training import trust


def function() -> None: ...


class Kind:
    pass


@pytest.mark.parametrize("module", [torch, torch.nn.functional, torch.ops.aten, jax, np, json, dynaxla], ids=lambda module: module.__name__)
def test_trusted_modules(module: types.ModuleType) -> None:
    assert trust.is_trusted_module(module)


def test_other_modules() -> None:
    assert not trust.is_trusted_module(pytest)
    assert not trust.is_trusted_module(types.ModuleType("torch")), "a name is not enough"


def test_functions() -> None:
    assert trust.is_trusted_function(json.dumps)
    assert not trust.is_trusted_function(function)
    assert not trust.is_trusted_function(functools.wraps(json.dumps)(lambda: None)), "wraps copies names"


def test_classes() -> None:
    assert all(map(trust.is_trusted_class, (int, collections.OrderedDict, torch.nn.Linear, np.ndarray)))
    assert not trust.is_trusted_class(Kind)
    scope: dict[str, Any] = {}
    exec("class Nameless: pass", scope)
    assert scope["Nameless"].__module__ == "builtins"
    assert not trust.is_trusted_class(scope["Nameless"])


def test_files() -> None:
    assert trust.is_trusted_file(json.__file__)
    assert trust.is_trusted_file("<frozen importlib._bootstrap>")
    assert not trust.is_trusted_file(__file__)
    installed = str(Path(json.__file__).parents[1] / "site-packages" / "timm" / "layers.py")
    assert not trust.is_trusted_file(installed)
    assert trust.is_installed_file(installed)
