"""Cheaper compilation by XLA, for tests whose subject is not the code that XLA makes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import jax

from dynaxla.runtime.clients import cpu_device
from dynaxla.runtime.programs import compile_lowered

# True in a run of `make quick`.
is_asked_for = False

# The emitters that XLA had before MLIR's, a compiler that does not optimize, and one module of code where there would be many.
_WANTED = {"xla_cpu_use_fusion_emitters": False, "xla_backend_optimization_level": 0, "xla_cpu_parallel_codegen_split_count": 1}


@functools.cache
def options() -> Mapping[str, Any]:
    """Those of them that this XLA has."""
    with jax.default_device(cpu_device()):
        trivial = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32"))
    known = {}
    for name, value in _WANTED.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # no such option
            compile_lowered(trivial, cpu_device(), {name: value})
            known[name] = value
    return known


def flags() -> str:
    """The same as a value of the variable XLA_FLAGS, for a process whose own JAX compiles, too."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in options().items())
