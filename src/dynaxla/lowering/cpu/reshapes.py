"""Reshapes of arrays whose dimensions lie in memory in another order than their value's.

A picture's tokens, (batch, places, channels), become (batch, channels, height, width) for a convolution: as a value by a transpose and a
reshape. In memory nothing moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Order = tuple[int, ...]


def reshaped(shape: Sequence[int], order: Order, wanted: Sequence[int]) -> tuple[tuple[int, ...], Order] | None:
    """What becomes of an array in memory when its value's shape becomes `wanted`, if no number has to move for that.

    shape: the value's. order: dimension i of the array is dimension order[i] of the value.
    Returns: the array's new shape and order; None if numbers have to move.
    """
    if 0 in shape:
        return None
    groups = _groups(shape, wanted)
    solid = [dim for dim in order if shape[dim] > 1]
    found: list[int] = []
    while solid:
        before, after = groups.get(solid[0], ([], []))
        if not before or solid[: len(before)] != before:  # they are not neighbours, or not in their order
            return None
        found += after
        del solid[: len(before)]
    for dim, size in enumerate(wanted):
        if size == 1:  # lies anywhere; behind its neighbour an order stays plain that is
            found.insert(found.index(dim - 1) + 1 if dim else 0, dim)
    return tuple(wanted[dim] for dim in found), tuple(found)


def joining(shape: Sequence[int], order: Order, wanted: Sequence[int]) -> Order | None:
    """The order like this one in which dimensions that become one are in their own order; None if others lie between them."""
    if 0 in shape:
        return None
    groups = _groups(shape, wanted)
    group_of = {dim: first for first, (before, _) in groups.items() for dim in before}
    runs = [first for first, _ in itertools.groupby(group_of[dim] for dim in order if shape[dim] > 1)]
    if len(runs) > len(groups):
        return None
    return (*(dim for dim in order if shape[dim] <= 1), *(dim for first in runs for dim in groups[first][0]))


def _groups(shape: Sequence[int], wanted: Sequence[int]) -> dict[int, tuple[list[int], list[int]]]:
    """The smallest runs of dimensions that become runs of others, by the first of each run; without those of one number."""
    groups: dict[int, tuple[list[int], list[int]]] = {}
    dims, others = ([dim for dim, size in enumerate(sizes) if size > 1] for sizes in (shape, wanted))
    while dims:
        count, end = 1, 1
        while (mine := math.prod(shape[dim] for dim in dims[:count])) != (theirs := math.prod(wanted[dim] for dim in others[:end])):
            count, end = (count + 1, end) if mine < theirs else (count, end + 1)
        groups[dims[0]] = dims[:count], others[:end]
        dims, others = dims[count:], others[end:]
    return groups
