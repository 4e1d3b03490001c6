"""Differences of eager mode between platforms, for which ATen has separate kernels."""

from __future__ import annotations

import platform as machine
from dataclasses import dataclass, replace

# The "platform" of a function that runs on every platform, and that JAX may differentiate, batch and shard. Such a function consists of
# JAX's own operations only, without any implementation, lowering or memory order that is specific to one platform.
PORTABLE = "portable"


@dataclass(frozen=True)
class EagerBehavior:
    """The behaviour of ATen's kernels on one platform.

    Attributes:
        refuses_zero_divisors: If True, an integer division by zero raises; if False, its result is an arbitrary number.
        prevents_merging: If True, lowerings prevent two rewrites of XLA, since eager mode performs neither: a division of several elements
            by one number becomes a product with the reciprocal, and successive divisions, sums or products are merged into one.
        fused_gelu: The `approximate` argument of the GELU that is computed together with a matrix product: "none" or "tanh".
        widens_small_scales: If True, quantization replaces a very small scale by a larger one.
        casts_like_x86: If True, a float outside an integer dtype's range becomes the lowest integer; if False, the nearest one. See
            `promotion._float_to_integer`.
        centers_first: If True, a batch norm with running statistics subtracts the mean before it multiplies; if False, it multiplies first,
            and then adds one shift per channel.
        rounds_operands: If True, an op of a half-precision tensor and a number (or a rank-0 float32) rounds the number to the tensor's
            dtype, although the op computes in float32.
        loops_over_few_terms: If True, ATen's own loops compute products of batches of small matrices, and complex matrix-vector products;
            if False, BLAS computes them.
    """

    refuses_zero_divisors: bool = False
    prevents_merging: bool = False
    fused_gelu: str = "tanh"  # cuBLAS has no exact GELU
    widens_small_scales: bool = False
    casts_like_x86: bool = False
    centers_first: bool = True
    rounds_operands: bool = False
    loops_over_few_terms: bool = False


_ACCELERATOR = EagerBehavior()
_CPU = EagerBehavior(
    refuses_zero_divisors=True,
    prevents_merging=True,
    fused_gelu="none",
    widens_small_scales=True,
    centers_first=False,
    rounds_operands=True,
    loops_over_few_terms=True,
    casts_like_x86=machine.machine().lower() in ("x86_64", "amd64", "i386", "i686"),
)
# As on the CPU, but independent of this machine's processor. Quotients may differ from eager mode in the last bit: the barrier that makes
# divisions exact (`ops/division.py`) costs time, and is left out.
_PORTABLE = replace(_CPU, prevents_merging=False, casts_like_x86=False)


def eager_behavior_on(platform: str) -> EagerBehavior:
    """Returns eager mode's behaviour on a platform: a JAX platform name, or PORTABLE."""
    return {"cpu": _CPU, PORTABLE: _PORTABLE}.get(platform, _ACCELERATOR)
