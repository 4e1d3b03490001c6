"""Circular padding. No ATen op expresses it, so it is recognized as a pattern: a tensor concatenated with slices of its own ends, along one
dimension after another. `passes/dynamo/composites.py` writes `F.pad` in this way, and users write it by hand.
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

# Bytes of the result from which on copies by torch, one for each piece, take half the time of XLA's concatenations.
_WORTHWHILE = 1 << 19


@dataclass(frozen=True)
class CircularPaddingProblem:
    """The shape, dtype and padding of a circular padding.

    Attributes:
        shape: of the tensor before padding.
        dtype: of the tensor.
        sides: for each dimension, the number of elements that are added before and after.
        platform: JAX's name of the platform.
    """

    shape: tuple[int, ...]
    dtype: DType
    sides: tuple[tuple[int, int], ...]
    platform: str

    @property
    def out(self) -> tuple[int, ...]:
        """The result's shape."""
        return tuple(before + size + behind for size, (before, behind) in zip(self.shape, self.sides, strict=True))

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)} to {list(self.out)}"


def _prefers_torch(problem: CircularPaddingProblem) -> bool:
    """True for a large result whose last dimension is padded. Without padding there XLA copies whole rows, and is as fast."""
    return any(problem.sides[-1]) and math.prod(problem.out) * problem.dtype.itemsize >= _WORTHWHILE


CIRCULAR: Implementations[CircularPaddingProblem] = Implementations("circular padding")
Join = Callable[[], Array]


@CIRCULAR.implementation("torch", platforms=["cpu"], preferred=_prefers_torch)
def _by_torch(problem: CircularPaddingProblem, x: Array, join: Join) -> Array:
    def write(results: Sequence[torch.Tensor], operands: Sequence[torch.Tensor]) -> None:
        inside = results[0]
        for dim, (size, (before, _)) in enumerate(zip(problem.shape, problem.sides, strict=True)):
            inside = inside.narrow(dim, before, size)
        inside.copy_(operands[0])
        for dim in reversed(range(len(problem.shape))):
            size, (before, behind) = problem.shape[dim], problem.sides[dim]
            part = results[0]  # the part already written, with its padding along `dim`
            for other in range(dim):
                part = part.narrow(other, problem.sides[other][0], problem.shape[other])
            part.narrow(dim, 0, before).copy_(part.narrow(dim, size, before))
            part.narrow(dim, before + size, behind).copy_(part.narrow(dim, before, behind))

    return torch_kernels.call(write, [x], [(problem.out, problem.dtype)])[0]


@CIRCULAR.implementation("xla")
def _by_xla(problem: CircularPaddingProblem, x: Array, join: Join) -> Array:
    return join()


def padded(ctx: Context, join: Join) -> Array:
    """The value of the current node, an `aten.cat`: by an implementation of CIRCULAR if it is circular padding, else by `join`.

    join: computes any concatenation.
    """
    found: dict[int, tuple[int, int]] = {}
    node = ctx.node
    while (ends := _ends(node, ctx)) is not None and ends[1] not in found:
        node, dim, sides = ends
        found[dim] = sides
    if not found or not Layout.of(ctx.spec(node).shape, ctx.spec(node).stride).is_row_major:
        return join()
    x = ctx.values[node]
    problem = CircularPaddingProblem(x.shape, x.dtype, tuple(found.get(dim, (0, 0)) for dim in range(x.ndim)), ctx.platform)
    return ctx.choose(CIRCULAR, problem).run(problem, x, join)


def _ends(node: Node, ctx: Context) -> tuple[Node, int, tuple[int, int]] | None:
    """If the node concatenates a source with slices of the source's own ends: the source, the dimension, and the numbers of elements before
    and after the source. Else None."""
    if node.target is not aten.cat.default:
        return None
    pieces: Any = node.args[0]
    for index in range(max(len(pieces) - 2, 0), min(len(pieces), 2)):  # of the source, with at most one piece before and one after it
        ends = {place - index: _slice(piece, ctx) for place, piece in enumerate(pieces) if place != index}
        found = [end for end in ends.values() if end is not None and end[0] is pieces[index]]
        if not found or len(found) < len(ends):
            continue
        shape = ctx.spec(pieces[index]).shape
        dim = wrap(node.args[1] if len(node.args) > 1 else 0, len(shape))
        before, behind = (end[2] if end is not None else range(0) for end in (ends.get(-1), ends.get(1)))
        are_ends = before == range(shape[dim])[shape[dim] - len(before) :] and behind == range(len(behind))
        if are_ends and all(end[1] == dim for end in found):
            return pieces[index], dim, (len(before), len(behind))
    return None


def _slice(node: Node, ctx: Context) -> tuple[Any, int, range] | None:
    """If the node is a slice: the sliced node, the dimension, and the indices along it. Else None."""
    if node.target is not aten.slice.Tensor:
        return None
    given: list[Any] = [ctx.spec_of(argument) for argument in node.args]
    source, dim, start, end, step = given + [0, None, None, 1][len(given) - 1 :]
    dim = wrap(dim, len(source.shape))
    return node.args[0], dim, range(source.shape[dim])[start:end:step]
