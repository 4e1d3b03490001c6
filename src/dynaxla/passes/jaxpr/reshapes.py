"""Reshapes, without copies, of arrays whose memory order differs from the order of their value's dimensions; for transposes.py.

For example, an image's tokens, (batch, positions, channels), become (batch, channels, height, width) for a convolution, by a transpose and
a reshape. In channels-last memory no element moves.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Order = tuple[int, ...]


def reshaped(shape: Sequence[int], order: Order, wanted: Sequence[int]) -> tuple[tuple[int, ...], Order] | None:
    """Returns the shape and order of an array after its value is reshaped to `wanted`; None if elements would have to move.

    Args:
        shape: of the value.
        order: dimension i of the array is dimension order[i] of the value. The same holds for the returned order.
        wanted: the new shape of the value.
    """
    if 0 in shape:
        return None
    groups = _groups(shape, wanted)
    solid = [dim for dim in order if shape[dim] > 1]
    found: list[int] = []
    while solid:
        before, after = groups.get(solid[0], ([], []))
        if not before or solid[: len(before)] != before:  # the group's dimensions are not adjacent, or not in order
            return None
        found += after
        del solid[: len(before)]
    for dim, size in enumerate(wanted):
        if size == 1:  # may be anywhere; after its predecessor, it keeps a plain order plain
            found.insert(found.index(dim - 1) + 1 if dim else 0, dim)
    return tuple(wanted[dim] for dim in found), tuple(found)


def joining(shape: Sequence[int], order: Order, wanted: Sequence[int]) -> Order | None:
    """Returns `order` with the dimensions of each merged group sorted; None if other dimensions lie within a group.

    `reshaped` may succeed with this order where it fails with `order`.
    """
    if 0 in shape:
        return None
    groups = _groups(shape, wanted)
    group_of = {dim: first for first, (before, _) in groups.items() for dim in before}
    runs = [first for first, _ in itertools.groupby(group_of[dim] for dim in order if shape[dim] > 1)]
    if len(runs) > len(groups):
        return None
    return (*(dim for dim in order if shape[dim] <= 1), *(dim for first in runs for dim in groups[first][0]))


def _groups(shape: Sequence[int], wanted: Sequence[int]) -> dict[int, tuple[list[int], list[int]]]:
    """Returns the smallest runs of dimensions of `shape` that become runs of dimensions of `wanted`.

    Keys are the first dimensions of the runs of `shape`. Dimensions of size 1 are left out.
    """
    groups: dict[int, tuple[list[int], list[int]]] = {}
    dims, others = ([dim for dim, size in enumerate(sizes) if size > 1] for sizes in (shape, wanted))
    while dims:
        count, end = 1, 1
        while (mine := math.prod(shape[dim] for dim in dims[:count])) != (theirs := math.prod(wanted[dim] for dim in others[:end])):
            count, end = (count + 1, end) if mine < theirs else (count, end + 1)
        groups[dims[0]] = dims[:count], others[:end]
        dims, others = dims[count:], others[end:]
    return groups
