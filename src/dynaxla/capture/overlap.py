"""Inputs that lie in the same memory, where AOTAutograd takes them not to.

AOTAutograd makes inputs that overlap, and of which one is written to, views of one input, so that each sees the writes to the others.
torch 2.13 takes a block of rows and columns and the whole matrix for tensors that do not overlap
(`compute_overlapping_tensors([m[1:, :2], m])` is empty): writes to one are then not seen in the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..runtime import private
from ..runtime.layout import ORDINARY

# Elements; of larger tensors whose extents overlap it is taken for granted that they share some.
_MOST = 1 << 20


def overlooked(inputs: Sequence[Any]) -> set[int]:
    """The positions of tensors that share elements with another one, though torch says that they do not."""
    places: dict[int, list[int]] = {}
    for position, item in enumerate(inputs):
        if isinstance(item, torch.Tensor) and item.layout == torch.strided and type(item) in ORDINARY:
            places.setdefault(private.storage_id(item), []).append(position)
    found: set[int] = set()
    for positions in places.values():
        for one, other in itertools.combinations(positions, 2):
            if not _torch_finds(inputs[one], inputs[other]) and _overlap(inputs[one], inputs[other]):
                found |= {one, other}
    return found


def _torch_finds(one: torch.Tensor, other: torch.Tensor) -> bool:
    return private.overlapping is None or bool(private.overlapping([one, other], symbolic=False))


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    (start, end), (begin, last) = _extent(one), _extent(other)
    if end <= begin or last <= start:
        return False
    if one.dtype != other.dtype or max(one.numel(), other.numel()) > _MOST:
        return True
    return not set(_elements(one)).isdisjoint(_elements(other))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The bytes between a tensor's first element and its last: start, end."""
    start = tensor.storage_offset() * tensor.element_size()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _elements(tensor: torch.Tensor) -> list[int]:
    found = np.array(tensor.storage_offset())
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        found = found[..., None] + np.arange(size) * step
    return found.ravel().tolist()
