"""Cheaper compilation, for tests whose subject is not the code that XLA makes of one op."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import jax
import pytest

from dynaxla.engine import options as engine_options
from dynaxla.engine import xla
from dynaxla.runtime.clients import cpu_device
from dynaxla.runtime.programs import compile_lowered


@functools.cache
def _quick_options() -> Mapping[str, Any]:
    """Those of them that this XLA has: the emitters that it had before MLIR's, and a compiler that does not optimize."""
    with jax.default_device(cpu_device()):
        trivial = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32"))
    options = {}
    for name, value in {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 0}.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # no such option
            compile_lowered(trivial, cpu_device(), {name: value})
            options[name] = value
    return options


@pytest.fixture
def quick_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA compiles in a quarter of the time, to other code. Values as XLA's own options give them are for tests without this fixture:
    each lowering's are in its row of the table."""
    options_for = engine_options.options_for
    monkeypatch.setattr(xla, "options_for", lambda *problem: {**options_for(*problem), **_quick_options()})
