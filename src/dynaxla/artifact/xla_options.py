"""The options that XLA:CPU needs to compute correct values. engine/options.py adds options for speed."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

# The fusion types are the ops that XLA:CPU may pass to its kernel library YNNPACK. This value allows single dots and convolutions, but no
# reductions and no fusions, because of three faults:
# - Fused reductions lose NaNs in max and min over more than a few thousand elements.
# - A pooling inside a fused dot is computed again for each use (vgg16's classifier at batch 8 takes 24 s).
# - In jaxlib 0.10.2, but not in 0.12.0.1, some sums of products of reshaped operands read wrong memory:
#   `(q * k.reshape(1, 1, 64, 8, 8)).sum(3)` for q of shape (1, 2, 1, 8, 8) and k of shape (1, 64, 64).
CPU_OPTIONS: Mapping[str, Any] = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION",
}


def supported_options(candidates: Iterable[tuple[str, Any]], compile: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Returns the options that the installed XLA accepts, as a dict. If a name has several values, the last accepted value wins.

    Args:
        candidates: pairs of name and value.
        compile: compiles a small program with options, for any platform: each platform accepts the options of all platforms.
    """
    options = {}
    for name, value in candidates:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # XLA has no such option or value
            compile({name: value})
            options[name] = value
    return options


def not_set_by_user(options: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Returns the options that the environment variable XLA_FLAGS does not set."""
    set_by_user = {word.lstrip("-").partition("=")[0] for word in os.environ.get("XLA_FLAGS", "").split()}
    return [(name, value) for name, value in options if name not in set_by_user]


@functools.cache
def _options_for_jit() -> dict[str, Any]:
    trivial = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32"))
    return supported_options(not_set_by_user(CPU_OPTIONS.items()), lambda options: trivial.compile(compiler_options=options))


def jit_with_cpu_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that `jax.jit` compiles with CPU_OPTIONS, except options that XLA does not know or that XLA_FLAGS sets.

    If the caller calls it inside `jax.jit`, it becomes part of the caller's program, which has the caller's options.
    """
    inlined, alone = jax.jit(function), functools.cache(lambda: jax.jit(function, compiler_options=_options_for_jit()))

    def call(*operands: Any) -> Any:
        if any(isinstance(operand, jax.core.Tracer) for operand in operands):
            return inlined(*operands)
        try:
            return alone()(*operands)
        except ValueError:  # JAX raises it for options inside another `jax.jit`, where constant operands are no tracers
            if not isinstance(jax.lax.neg(np.int32(0)), jax.core.Tracer):  # not inside `jax.jit`, so the error has another cause
                raise
            return inlined(*operands)

    return call
