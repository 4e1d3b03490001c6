"""Between convolutions on the CPU activations lie channels-last in memory, as its kernels for convolutions read and write them.

Arrays have their dimensions in PyTorch's order, (batch, channel, *space). A transpose before a convolution and one behind it say how they
lie; between two convolutions such transposes cancel out: see transposes.py.
"""

from __future__ import annotations

import torch
from jax import Array, lax

from ...torch_ops import aten
from ..context import Context

Order = tuple[int, ...]


def channels_last(x: Array) -> Array:
    """(batch, channel, *space) to (batch, *space, channel)."""
    return lax.transpose(x, _last(x.ndim))


def channels_first(x: Array) -> Array:
    """(batch, *space, channel) to (batch, channel, *space)."""
    return lax.transpose(x, (0, x.ndim - 1, *range(1, x.ndim - 1)))


def order_between_convolutions(rank: int, platform: str) -> Order | None:
    """How activations lie: their dimensions from the slowest in memory to the fastest; None: row-major."""
    return _last(rank) if platform == "cpu" else None


def order_in_program(ctx: Context) -> Order:
    """How the current node's first argument lies in the program's memory: dimensions from the slowest to the fastest.

    Convolutions and their gradients leave channels-last, inputs lie as the caller has them, and what comes between follows.
    """
    node: torch.fx.Node = ctx.node.args[0]
    rank = node.meta["val"].dim()
    while node.op == "call_function":
        if node.target in (aten.convolution.default, aten.convolution_backward.default):
            return _last(rank)
        # Of an op with several results, the one that is wanted follows; it has no rank of its own.
        sources = [source for source in node.all_input_nodes if _rank(source) in (rank, None)]
        if not sources:
            break
        node = sources[0]
    return ctx.spec(node).order if _rank(node) == rank else tuple(range(rank))


def _last(rank: int) -> Order:
    return (0, *range(2, rank), 1)


def _rank(node: torch.fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.dim() if isinstance(value, torch.Tensor) else None
