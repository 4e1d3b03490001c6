"""Circular padding, recognized as a pattern because it has no ATen op.

In the pattern, a tensor is concatenated with slices of its own ends, along one dimension after another. `passes/dynamo/composites.py`
decomposes `F.pad` in this way, and users write the pattern by hand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jax import Array
from torch.fx import Node

from ...runtime.layout import Layout
from ...torch_ops import aten
from ..context import Context
from ..cpu import torch_kernels
from ..dimensions import wrap
from ..dtypes import DType
from ..implementations import Implementations

# For results of this size or more, torch takes half the time of XLA's concatenations: it copies each piece once.
_MIN_BYTES_FOR_TORCH = 1 << 19


@dataclass(frozen=True)
class CircularPaddingProblem:
    """The shape, dtype and padding of a circular padding.

    Attributes:
        shape: shape of the tensor before padding.
        dtype: dtype of the tensor.
        padding: for each dimension, the numbers of elements that are added before and after it.
        platform: JAX's name of the platform.
    """

    shape: tuple[int, ...]
    dtype: DType
    padding: tuple[tuple[int, int], ...]
    platform: str

    @property
    def out(self) -> tuple[int, ...]:
        """Shape of the result."""
        return tuple(before + size + after for size, (before, after) in zip(self.shape, self.padding, strict=True))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} to {list(self.out)}"


def _prefers_torch(problem: CircularPaddingProblem) -> bool:
    """True for a large result whose last dimension is padded. If only others are padded, XLA copies whole rows, and is as fast."""
    return any(problem.padding[-1]) and math.prod(problem.out) * problem.dtype.itemsize >= _MIN_BYTES_FOR_TORCH


CIRCULAR: Implementations[CircularPaddingProblem] = Implementations("circular padding")
ConcatenateFunction = Callable[[], Array]


@CIRCULAR.implementation("torch", platforms=["cpu"], preferred=_prefers_torch)
def _by_torch(problem: CircularPaddingProblem, x: Array, concatenate: ConcatenateFunction) -> Array:
    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        inside = results[0]
        for dim, (size, (before, _)) in enumerate(zip(problem.shape, problem.padding, strict=True)):
            inside = inside.narrow(dim, before, size)
        inside.copy_(operands[0])
        for dim in reversed(range(len(problem.shape))):
            size, (before, after) = problem.shape[dim], problem.padding[dim]
            slab = results[0]  # the part whose two ends along `dim` are written next; later dimensions have their padding
            for outer_dim in range(dim):
                slab = slab.narrow(outer_dim, problem.padding[outer_dim][0], problem.shape[outer_dim])
            slab.narrow(dim, 0, before).copy_(slab.narrow(dim, size, before))
            slab.narrow(dim, before + size, after).copy_(slab.narrow(dim, before, after))

    return torch_kernels.call(write, [x], [(problem.out, problem.dtype)])[0]


@CIRCULAR.implementation("xla")
def _by_xla(problem: CircularPaddingProblem, x: Array, concatenate: ConcatenateFunction) -> Array:
    return concatenate()


def lower_cat(ctx: Context, concatenate: ConcatenateFunction) -> Array:
    """Returns the value of the current node, an `aten.cat`: by CIRCULAR if it pads a row-major tensor circularly, else by `concatenate`.

    Args:
        ctx: context of the node.
        concatenate: computes the node as an ordinary concatenation.
    """
    padding_by_dim: dict[int, tuple[int, int]] = {}
    node = ctx.node
    while (match := _match_circular_cat(node, ctx)) is not None and match[1] not in padding_by_dim:
        node, dim, padding = match
        padding_by_dim[dim] = padding
    if not padding_by_dim or not Layout.of(ctx.spec(node).shape, ctx.spec(node).stride).is_row_major:
        return concatenate()
    x = ctx.values[node]
    problem = CircularPaddingProblem(x.shape, x.dtype, tuple(padding_by_dim.get(dim, (0, 0)) for dim in range(x.ndim)), ctx.platform)
    return ctx.choose(CIRCULAR, problem).run(problem, x, concatenate)


def _match_circular_cat(node: Node, ctx: Context) -> tuple[Node, int, tuple[int, int]] | None:
    """Matches a node that concatenates a source with slices of the source's own ends.

    Returns:
        The source, the dimension, and the numbers of elements before and after the source; None if the node does not match.
    """
    if node.target is not aten.cat.default:
        return None
    pieces: Any = node.args[0]
    # index: a position that the source may have among the pieces. At most one piece comes before the source, and at most one after it.
    for index in range(max(len(pieces) - 2, 0), min(len(pieces), 2)):
        ends = {position - index: _match_slice(piece, ctx) for position, piece in enumerate(pieces) if position != index}
        slices = [end for end in ends.values() if end is not None and end[0] is pieces[index]]
        if not slices or len(slices) < len(ends):
            continue
        shape = ctx.spec(pieces[index]).shape
        dim = wrap(node.args[1] if len(node.args) > 1 else 0, len(shape))
        before, after = (end[2] if end is not None else range(0) for end in (ends.get(-1), ends.get(1)))
        are_ends = before == range(shape[dim])[shape[dim] - len(before) :] and after == range(len(after))
        if are_ends and all(end[1] == dim for end in slices):
            return pieces[index], dim, (len(before), len(after))
    return None


def _match_slice(node: Node, ctx: Context) -> tuple[Any, int, range] | None:
    """Returns the sliced node, the dimension and the indices along it if the node is a slice, else None."""
    if node.target is not aten.slice.Tensor:
        return None
    arguments: list[Any] = [ctx.spec_of(argument) for argument in node.args]
    source, dim, start, end, step = arguments + [0, None, None, 1][len(arguments) - 1 :]
    dim = wrap(dim, len(source.shape))
    return node.args[0], dim, range(source.shape[dim])[start:end:step]
