"""A pass over a traced program that makes it suitable for XLA's partitioner: platform-independent branches, and no merged dimensions.

By `lax.platform_dependent`, lowerings choose the code that a single CPU computes fastest: sums folded into vector registers, exponentials
by bit arithmetic, values written to memory by calls. This code has slices and barriers, for which the partitioner would copy whole arrays
between devices.

ATen's matrix products have one batch dimension: attention merges (batch, heads). If both are sharded, no sharding describes the merged
dimension, and the partitioner gathers the heads. So the pass defers a reshape that merges dimensions until an op needs it: products,
elementwise functions and reductions work on the separate dimensions.

The pass helps on TPUs, too. XLA's compiler for TPUs chooses memory orders, but a merged dimension leaves no choice, and the compiler adds
copies. With this pass, a block of GPT-2 (8 x 1024) takes 3.7 million cycles, and 4.2 million without (v5e, libtpu 0.0.42).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax

from .evaluation import Evaluation, bind
from .transposes import ELEMENTWISE, REDUCTIONS

# Not the name of a platform, so that each `platform_dependent` takes its default branch.
_NO_PLATFORM = "none"
# From this ratio of the operands' elements on, the larger operand of a product, a weight, keeps its shape. On a TPU, each call would copy
# the weight: VGG16 with a batch of 8 takes 4.9 million cycles, and 7.5 million if its weight of 4096 x 25088 is divided into 4096 x 512 x 7
# x 7 (a ratio of 512). ViT with a batch of 1 takes 1.39 million cycles, and 1.33 million if the weights of 768 x 768 are divided into heads
# (a ratio of 4). v5e, libtpu 0.0.42, 2026-11-29: make tpu-programs.
_MUCH_LARGER = 64


@dataclass(frozen=True)
class _Merged:
    """A value with a deferred reshape that merges dimensions.

    Attributes:
        array: the array before the reshape. Its shape is the sizes of all groups, in order.
        groups: for each dimension of the value, the sizes of the array's dimensions that are merged; empty for a dimension of size 1.
    """

    array: Any
    groups: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(math.prod, self.groups))

    def dims(self, value_dims: Sequence[int]) -> tuple[int, ...]:
        """Returns the array's dimensions that are merged into these dimensions of the value."""
        starts = np.cumsum([0, *map(len, self.groups)])
        return tuple(int(dim) for index in value_dims for dim in range(starts[index], starts[index + 1]))

    def with_groups(self, groups: Sequence[tuple[int, ...]]) -> _Merged:
        """Returns the same value with other groups, whose products are the same."""
        return _Merged(lax.reshape(self.array, [size for group in groups for size in group]), tuple(groups))


def _as_merged(value: Any) -> _Merged:
    """Returns a value as a _Merged. For an array, each group has the size of one dimension."""
    if isinstance(value, _Merged):
        return value
    groups = tuple((size,) if size != 1 else () for size in value.shape)
    return _Merged(lax.squeeze(value, [dim for dim, size in enumerate(value.shape) if size == 1]), groups)


def _unwrapped(merged: _Merged) -> Any:
    return merged.array if all(len(group) == 1 for group in merged.groups) else merged


def _groups(sizes: Sequence[int], shape: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """Divides `sizes`, without 1s, into consecutive groups whose products are the sizes in `shape`. Returns None if this is impossible."""
    remaining, groups = [size for size in sizes if size != 1], []
    for merged_size in shape:
        group: list[int] = []
        while remaining and math.prod(group) < merged_size:
            group.append(remaining.pop(0))
        if math.prod(group) != merged_size:
            return None
        groups.append(tuple(group))
    return tuple(groups)


class _PartitionableEvaluation(Evaluation[Any]):
    """The pass. Its values are arrays or _Merged."""

    title = "partitionable"

    def __init__(self, free: Collection[int]) -> None:
        super().__init__(_NO_PLATFORM)
        self._free = free

    def wrap(self, array: Any) -> Any:
        return array

    def unwrap(self, value: Any) -> Any:
        return lax.reshape(value.array, value.shape) if isinstance(value, _Merged) else value

    def unwrap_result(self, index: int, value: Any) -> Any:
        return value.array if index in self._free and isinstance(value, _Merged) else self.unwrap(value)

    def in_memory(self, value: Any) -> Any:
        return value

    def apply(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        if name == "reshape" and params["dimensions"] is None:
            return [_reshape(operands[0], params["new_sizes"])]
        merged = next((operand for operand in operands if isinstance(operand, _Merged)), None)
        if merged is None:
            return bind(equation, operands)
        if (
            name == "slice"
            and params["strides"] is None
            and tuple(params["limit_indices"]) == merged.shape
            and not any(params["start_indices"])
        ):
            return [merged]
        if name == "dot_general":
            return [_product(equation, *map(_as_merged, operands))]
        if name == "transpose":
            order = params["permutation"]
            return [_Merged(lax.transpose(merged.array, merged.dims(order)), tuple(merged.groups[dim] for dim in order))]
        if name in REDUCTIONS:
            groups = tuple(group for dim, group in enumerate(merged.groups) if dim not in params["axes"])
            (array,) = bind(equation, [merged.array], {**params, "axes": merged.dims(params["axes"])})
            return [_unwrapped(_Merged(array, groups))]
        if name in ELEMENTWISE and all(not isinstance(item, _Merged) or item.groups == merged.groups for item in operands):
            arrays = [
                item.array if isinstance(item, _Merged) else lax.reshape(item, merged.array.shape) if np.ndim(item) else item
                for item in operands
            ]
            return [_Merged(array, merged.groups) for array in bind(equation, arrays)]
        return bind(equation, [self.unwrap(operand) for operand in operands])

    def _apply(self, equation: Any, operands: list[Any]) -> Sequence[Any]:
        name = str(equation.source_info.name_stack)
        with jax.named_scope(name) if name else contextlib.nullcontext():  # the scope names the user's source line
            return self._results(equation, operands)


def _reshape(value: Any, shape: Sequence[int]) -> Any:
    array = value.array if isinstance(value, _Merged) else value
    groups = _groups(array.shape, shape) if math.prod(shape) > 1 else None
    if groups is None or all(len(group) <= 1 for group in groups):
        return lax.reshape(array, shape)
    return _Merged(lax.squeeze(array, [dim for dim, size in enumerate(array.shape) if size == 1]), groups)


def _common_group(x_group: tuple[int, ...], y_group: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the sizes into which both operands of a product divide a shared dimension. An undivided operand follows the other one."""
    if len(x_group) <= 1:
        return y_group
    return x_group if len(y_group) <= 1 or x_group == y_group else (math.prod(x_group),)


def _contracted_group(x: _Merged, y: _Merged, x_dim: int, y_dim: int) -> tuple[int, ...]:
    """Returns the sizes into which both operands of a product divide a contracted dimension.

    If only one operand divides the dimension, and the other operand is much larger, the dimension stays undivided: only the smaller operand
    is reshaped.
    """
    x_group, y_group = x.groups[x_dim], y.groups[y_dim]
    common = _common_group(x_group, y_group)
    divided, other = (x, y) if len(x_group) > 1 else (y, x)
    is_divided_by_one = len(common) > 1 and (len(x_group) <= 1 or len(y_group) <= 1)
    return (math.prod(common),) if is_divided_by_one and math.prod(other.shape) > _MUCH_LARGER * math.prod(divided.shape) else common


def _product(equation: Any, x: _Merged, y: _Merged) -> Any:
    contracted, batch = equation.params["dimension_numbers"]
    x_groups, y_groups = list(x.groups), list(y.groups)
    for x_dim, y_dim in zip(*contracted, strict=True):
        x_groups[x_dim] = y_groups[y_dim] = _contracted_group(x, y, x_dim, y_dim)
    for x_dim, y_dim in zip(*batch, strict=True):
        x_groups[x_dim] = y_groups[y_dim] = _common_group(x.groups[x_dim], y.groups[y_dim])
    x, y = x.with_groups(x_groups), y.with_groups(y_groups)
    numbers = tuple((x.dims(pair[0]), y.dims(pair[1])) for pair in (contracted, batch))
    (array,) = bind(equation, [x.array, y.array], {**equation.params, "dimension_numbers": numbers})
    remaining = [
        item.groups[dim]
        for item, used in ((x, (*contracted[0], *batch[0])), (y, (*contracted[1], *batch[1])))
        for dim in range(len(item.groups))
        if dim not in used
    ]
    return _unwrapped(_Merged(array, (*(x.groups[dim] for dim in batch[0]), *remaining)))


def partitionable(program: Callable[..., Any], free: Collection[int] = ()) -> Callable[..., Any]:
    """Returns the same function, evaluated by this pass. The returned function must be traced, for example by `jax.jit`.

    Args:
        program: the function.
        free: the indices of results that may have any shape, provided that their elements in row-major order are the same.
    """
    return _PartitionableEvaluation(free).transform(program)
