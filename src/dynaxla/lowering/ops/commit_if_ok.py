"""The op `dynaxla::held`, which keeps an old value if one of the program's checks has failed. It is for GPUs, where a call does not wait
for the results of the checks."""

from __future__ import annotations

import torch
from jax import Array, lax

from ..context import Context
from ..promotion import expand
from ..registry import lowers

_library = torch.library.Library("dynaxla", "FRAGMENT")
_library.define("held(Tensor new, Tensor old) -> Tensor")


@torch.library.impl("dynaxla::held", "CompositeExplicitAutograd", lib=_library)
def _held_by_torch(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return new.clone()  # torch's kernels raise when a check fails


held = torch.ops.dynaxla.held.default


@lowers(held)
def _held(new: Array, old: Array, ctx: Context) -> Array:
    """`new` if all checks of earlier nodes of the graph hold, else `old`.

    Shape:  that of both.
    Dtype:  that of both.
    """
    holds = lax.full((), True)
    for check in ctx.checks:
        holds = lax.bitwise_and(holds, check.condition)
    return lax.select(expand(holds, new.shape), new, old)
