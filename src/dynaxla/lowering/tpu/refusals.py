"""Marks in functions for all platforms: if JAX lowers the function for a TPU, a mark raises UnsupportedOp.

A function for all platforms (`eager.PORTABLE`) is traced before its platform is known, and then has a lowering for each op. So the ops that
XLA does not compile for TPUs (uncompilable_ops.py) have marked operands.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ...errors import UnsupportedOp

_mark = Primitive("dynaxla_refused_on_tpu")


def marked(x: jax.Array, refusal: UnsupportedOp) -> jax.Array:
    """Returns x, unchanged on other platforms. JAX raises the error if it lowers a program for TPUs that computes this result."""
    return _mark.bind(x, refusal=refusal)


def _refuse(ctx: Any, x: Any, *, refusal: UnsupportedOp) -> Any:
    raise UnsupportedOp(refusal.message, op=refusal.op, inputs=refusal.inputs, where=refusal.where, hint=refusal.hint)


_mark.def_impl(lambda x, **_: x)
_mark.def_abstract_eval(lambda aval, **_: aval)
ad.deflinear2(_mark, lambda cotangent, _, **__: [cotangent])
batching.defvectorized(_mark)
mlir.register_lowering(_mark, lambda ctx, x, **_: [x])
mlir.register_lowering(_mark, _refuse, platform="tpu")
