"""Lowerings of the ops with packed weights, which passes/aten/weight_packing.py adds to graphs. See cpu/weight_orders.py."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jax import Array

from ..context import Context
from ..cpu import onednn, onednn_support, weight_orders
from ..cpu.channels_last import channels_first, channels_last
from ..epilogue import with_activation
from ..registry import lowers


@lowers(weight_orders.pack)
def pack(weight: Array, dims: Sequence[int], blocked: Sequence[int], sizes: Sequence[int]) -> Array:
    """The weight in the memory order that oneDNN's kernel reads, followed by zeros.

    Shape:  a vector, of `Packing.length` elements.
    Dtype:  that of the weight.
    """
    return weight_orders.Packing(tuple(dims), tuple(blocked), tuple(sizes)).pack(weight)


def _require_length(packed: Array, elements: int) -> None:
    """Rejects a packed weight that is too short: oneDNN does not know the size of the weight, and would read beyond its end.

    elements: the number of elements of the weight before it was packed.

    Raises: ValueError if the weight was packed for another version of jaxlib, or has fewer than `elements` + SLACK elements. SLACK is the
            number of zeros that a kernel may read after the weight.
    """
    if not onednn_support.supports_packed():
        raise ValueError("the weights were packed for another version of jaxlib: compile the model again here")
    if packed.size < elements + weight_orders.SLACK:
        raise ValueError(f"a packed weight of {packed.size} elements is too short for a weight of {elements} elements")


@lowers(weight_orders.packed_linear)
def packed_linear(x: Array, packed: Array, bias: Array | None, columns: int, *, ctx: Context) -> Array:
    """x @ weight + bias, computed together with the activation that follows in the graph, if there is one.

    Shape:  x (rows, in) gives (rows, columns).
    Dtype:  that of x.
    Raises: ValueError for a weight that was packed for another version of jaxlib, or is too short.
    """
    _require_length(packed, x.shape[1] * columns)

    def compute(activation: str) -> Array:
        return onednn.matmul(x, packed, False, False, x.dtype, bias, activation, packed_columns=columns)

    return with_activation(ctx, onednn.ACTIVATIONS, compute)


@lowers(weight_orders.packed_convolution)
def packed_convolution(
    x: Array,
    packed: Array,
    bias: Array | None,
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    *,
    ctx: Context,
) -> Array:
    """A convolution with a packed weight.

    Shape:  x (batch, in, height, width) gives (batch, out, height, width). The argument `weight` is the shape of the weight before packing,
            (out, in, height, width).
    Dtype:  that of x.
    Raises: ValueError for a weight that was packed for another version of jaxlib, or is too short.
    """
    _require_length(packed, math.prod(weight))
    batch, out, *space = ctx.output.shape
    padding_pairs = [(amount, amount) for amount in padding]
    result = onednn.convolution(
        channels_last(x), packed, (batch, *space, out), stride, padding_pairs, dilation, 1, x.dtype, bias, packed_shape=weight
    )
    return channels_first(result)
