"""What eager mode does on one platform and not on another, because ATen has kernels of its own for each."""

from __future__ import annotations

import platform as machine
from dataclasses import dataclass, replace

# In the place of a platform's name, for a function that runs on every platform and that JAX may differentiate, batch and shard: of nothing
# but JAX's own operations, with no form, lowering or order of dimensions that is there for one platform alone.
PORTABLE = "portable"


@dataclass(frozen=True)
class Eager:
    """What ATen's kernels for a platform do.

    Attributes: refuses_zero_divisors (an integer divided by zero raises; else the result is some number); divides_exactly (also by a
    number that several elements share; else by a product with its reciprocal); fused_gelu (which GELU is computed together with a
    product of matrices: its argument `approximate`); widens_small_scales (what is quantized with a very small scale gets a larger one);
    casts_like_x86 (a float that an integer cannot hold becomes the lowest one; else the nearest); centers_first (a batch norm by running
    statistics takes the mean away before it multiplies; else it adds one shift for a channel afterwards); rounds_operands (what stands
    beside a tensor of a half type is rounded to that type, though the op computes in float32; else it is not);
    loops_over_few_terms (ATen itself computes products of batches of small matrices, and complex products with vectors; else BLAS does).
    """

    refuses_zero_divisors: bool = False
    divides_exactly: bool = False
    fused_gelu: str = "tanh"  # cuBLAS has no other
    widens_small_scales: bool = False
    casts_like_x86: bool = False
    centers_first: bool = True
    rounds_operands: bool = False
    loops_over_few_terms: bool = False


_OTHER = Eager()
_CPU = Eager(
    refuses_zero_divisors=True,
    divides_exactly=True,
    fused_gelu="none",
    widens_small_scales=True,
    centers_first=False,
    rounds_operands=True,
    loops_over_few_terms=True,
    casts_like_x86=machine.machine().lower() in ("x86_64", "amd64", "i386", "i686"),
)
# As on the CPU, whatever machine this is, and without what only costs time: a barrier that keeps a quotient's last bit.
_PORTABLE = replace(_CPU, divides_exactly=False, casts_like_x86=False)


def eager_on(platform: str) -> Eager:
    """platform: JAX's name, or PORTABLE."""
    return {"cpu": _CPU, PORTABLE: _PORTABLE}.get(platform, _OTHER)
