"""Differences of eager mode between platforms, for which ATen has separate kernels."""

from __future__ import annotations

import platform as machine
from dataclasses import dataclass, replace

# Used in place of a platform's name for a function that runs on every platform, and that JAX may differentiate, batch and shard. Such a
# function consists of JAX's own operations only, without any implementation, lowering or dimension order that is specific to one platform.
PORTABLE = "portable"


@dataclass(frozen=True)
class EagerBehavior:
    """The behaviour of ATen's kernels on one platform.

    Attributes:
        refuses_zero_divisors: An integer division by zero raises; otherwise its result is an arbitrary number.
        divides_exactly: A division of several elements by one number is a true division; otherwise a product with the reciprocal.
        fused_gelu: The `approximate` argument of the GELU that is computed together with a matrix product.
        widens_small_scales: Quantization replaces a very small scale by a larger one.
        casts_like_x86: A float outside an integer dtype's range becomes the lowest integer; otherwise the nearest one.
        centers_first: A batch norm with running statistics subtracts the mean before it multiplies; otherwise it adds one shift per channel
            afterwards.
        rounds_operands: The other operand of a half-precision tensor is rounded to that dtype, although the op computes in float32.
        loops_over_few_terms: ATen's own loops compute products of batches of small matrices, and complex matrix-vector products; otherwise
            BLAS does.
    """

    refuses_zero_divisors: bool = False
    divides_exactly: bool = False
    fused_gelu: str = "tanh"  # the only one that cuBLAS has
    widens_small_scales: bool = False
    casts_like_x86: bool = False
    centers_first: bool = True
    rounds_operands: bool = False
    loops_over_few_terms: bool = False


_OTHER = EagerBehavior()
_CPU = EagerBehavior(
    refuses_zero_divisors=True,
    divides_exactly=True,
    fused_gelu="none",
    widens_small_scales=True,
    centers_first=False,
    rounds_operands=True,
    loops_over_few_terms=True,
    casts_like_x86=machine.machine().lower() in ("x86_64", "amd64", "i386", "i686"),
)
# As on the CPU, but independent of this machine's processor, and without the barrier that preserves the last bit of quotients: it costs
# time.
_PORTABLE = replace(_CPU, divides_exactly=False, casts_like_x86=False)


def eager_behavior_on(platform: str) -> EagerBehavior:
    """Returns eager mode's behaviour on a platform: a JAX platform name, or PORTABLE."""
    return {"cpu": _CPU, PORTABLE: _PORTABLE}.get(platform, _OTHER)
