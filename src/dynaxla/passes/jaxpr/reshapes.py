"""Reshapes, without copies, of a value whose array has the value's dimensions in another order. Used by transposes.py.

For example, a transpose and a reshape turn an image's tokens (batch, positions, channels) into (batch, channels, height, width) for a
convolution. With channels last in memory, no element moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Order = tuple[int, ...]


def reshaped(shape: Sequence[int], order: Order, new_shape: Sequence[int]) -> tuple[tuple[int, ...], Order] | None:
    """Returns the shape and order of an array after a reshape of its value. None if elements would move.

    Args:
        shape: the shape of the value.
        order: dimension i of the array is dimension order[i] of the value. The returned order has the same meaning.
        new_shape: the new shape of the value.
    """
    if 0 in shape:
        return None
    groups = _groups(shape, new_shape)
    dims_in_memory = [dim for dim in order if shape[dim] > 1]
    new_order: list[int] = []
    while dims_in_memory:
        before, after = groups.get(dims_in_memory[0], ([], []))
        if not before or dims_in_memory[: len(before)] != before:  # the group's dimensions are not adjacent, or not in order
            return None
        new_order += after
        del dims_in_memory[: len(before)]
    for dim, size in enumerate(new_shape):
        if size == 1:  # any position is correct; the position after the preceding dimension keeps an unpermuted order unpermuted
            new_order.insert(new_order.index(dim - 1) + 1 if dim else 0, dim)
    return tuple(new_shape[dim] for dim in new_order), tuple(new_order)


def grouped_order(shape: Sequence[int], order: Order, new_shape: Sequence[int]) -> Order | None:
    """Returns `order` with the dimensions of each group (see `_groups`) sorted. None if dimensions of other groups are in between.

    `reshaped` may succeed with the returned order if it fails with `order`.
    """
    if 0 in shape:
        return None
    groups = _groups(shape, new_shape)
    group_of = {dim: first for first, (before, _) in groups.items() for dim in before}
    runs = [first for first, _ in itertools.groupby(group_of[dim] for dim in order if shape[dim] > 1)]
    if len(runs) > len(groups):
        return None
    return (*(dim for dim in order if shape[dim] <= 1), *(dim for first in runs for dim in groups[first][0]))


def _groups(shape: Sequence[int], new_shape: Sequence[int]) -> dict[int, tuple[list[int], list[int]]]:
    """Returns the smallest groups of adjacent dimensions of `shape` that become adjacent dimensions of `new_shape`.

    The key is the first dimension of a group, the value the group's dimensions in both shapes. Dimensions of size 1 are left out.
    """
    groups: dict[int, tuple[list[int], list[int]]] = {}
    dims, new_dims = ([dim for dim, size in enumerate(sizes) if size > 1] for sizes in (shape, new_shape))
    while dims:
        count, end = 1, 1
        while (size_before := math.prod(shape[dim] for dim in dims[:count])) != (
            size_after := math.prod(new_shape[dim] for dim in new_dims[:end])
        ):
            count, end = (count + 1, end) if size_before < size_after else (count, end + 1)
        groups[dims[0]] = dims[:count], new_dims[:end]
        dims, new_dims = dims[count:], new_dims[end:]
    return groups
