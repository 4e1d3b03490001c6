"""The op `dynaxla::commit_if_ok`, which returns a new value, or the old value if one of the program's checks has failed.

Programs for GPUs use the op for late writes (passes/aten/late_writes.py), because their calls do not wait for the results of the checks.
"""

from __future__ import annotations

import torch
from jax import Array, lax

from ..context import Context
from ..promotion import expand
from ..registry import lowers

_library = torch.library.Library("dynaxla", "FRAGMENT")
_library.define("commit_if_ok(Tensor new, Tensor old) -> Tensor")


@torch.library.impl("dynaxla::commit_if_ok", "CompositeExplicitAutograd", lib=_library)
def _return_new(new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return new.clone()  # in eager mode, a failed check has already raised


commit_if_ok = torch.ops.dynaxla.commit_if_ok.default


@lowers(commit_if_ok)
def lower_commit_if_ok(new: Array, old: Array, ctx: Context) -> Array:
    """`new` if no check of an earlier node of the graph failed, else `old`.

    Shape:  that of `new`; `old` has the same shape.
    Dtype:  that of `new`; `old` has the same dtype.
    """
    all_ok = lax.full((), True)
    for check in ctx.checks:
        all_ok = lax.bitwise_and(all_ok, check.condition)
    return lax.select(expand(all_ok, new.shape), new, old)
