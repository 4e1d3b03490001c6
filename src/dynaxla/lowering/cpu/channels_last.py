"""The channels-last memory order of activations between convolutions on the CPU, whose kernels read and write this order.

Arrays keep PyTorch's order of dimensions, (batch, channel, *space). A transpose before and one after each convolution express the memory
order. Between two convolutions these transposes cancel out; see passes/jaxpr/transposes.py.
"""

from __future__ import annotations

import torch
from jax import Array, lax

from ...torch_ops import aten
from ..context import Context

Order = tuple[int, ...]


def channels_last(x: Array) -> Array:
    """Transposes (batch, channel, *space) to (batch, *space, channel)."""
    return lax.transpose(x, _last(x.ndim))


def channels_first(x: Array) -> Array:
    """Transposes (batch, *space, channel) to (batch, channel, *space)."""
    return lax.transpose(x, (0, x.ndim - 1, *range(1, x.ndim - 1)))


def order_between_convolutions(rank: int, platform: str) -> Order | None:
    """Returns the memory order of activations: the dimensions from the slowest-varying to the fastest. None means row-major."""
    return _last(rank) if platform == "cpu" else None


def order_in_program(ctx: Context) -> Order:
    """Returns the memory order of the current node's first argument in the program: the dimensions from the slowest-varying to the fastest.

    Results of convolutions and of their gradients are channels-last. Graph inputs have the caller's order. Other nodes have the order of
    their first operand of the same rank.
    """
    node: torch.fx.Node = ctx.node.args[0]
    rank = node.meta["val"].dim()
    while node.op == "call_function":
        if node.target in (aten.convolution.default, aten.convolution_backward.default):
            return _last(rank)
        # The rank of a node with several results is None. The search continues at its operands.
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
