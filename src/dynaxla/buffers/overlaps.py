"""Inputs that share elements, and of which one is written to.

AOTAutograd makes them views of one tensor, so that each sees the writes to the others, at the places that they have when a graph is made.
Of some it takes for granted that they share nothing: those on storages of their own, and with torch 2.13 a block of rows and columns and
the whole matrix (`compute_overlapping_tensors([m[1:, :2], m])` is empty). And of where the tensors of a later call lie TorchDynamo's guards
say nothing: the graph would leave writes to one out of the other, or put them into the wrong place.

A tensor whose own elements share memory (expanded, or windows that overlap) is such a case by itself: a write to one of its elements is a
write to others, which a functional graph does not say.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..runtime import private
from ..runtime.layout import ORDINARY
from .addresses import addresses, bytes_behind, extent

# Elements: of two larger tensors whose extents overlap it is taken for granted that they share some.
_MOST = 1 << 20
# Pairs of tensors of which is known whether they share elements. In a ring of a buffer's rows, each distance is one of them.
_MOST_KNOWN = 1024
# As many tensors in other places are compared with all others one by one.
_FEW = 4
# No two tensors share elements: see `Overlaps._find`.
NOTHING: Any = ([], [])


def overlooked(inputs: Sequence[Any]) -> set[int]:
    """The positions of tensors that share elements with another one, though AOTAutograd will not see it."""
    found: set[int] = set()
    for one, other in _within_one_another({position: item for position, item in enumerate(inputs) if _is_plain(item)}):
        if not _torch_finds(inputs[one], inputs[other]) and share_elements(inputs[one], inputs[other]):
            found |= {one, other}
    return found


def folded(inputs: Sequence[Any]) -> set[int]:
    """The positions of tensors of which two elements have one place in memory."""
    return {position for position, item in enumerate(inputs) if _is_plain(item) and shares_with_itself(item)}


def _torch_finds(one: torch.Tensor, other: torch.Tensor) -> bool:
    if private.storage_id(one) != private.storage_id(other):
        return False
    return private.overlapping is None or bool(private.overlapping([one, other], symbolic=False))


def _is_plain(item: Any) -> bool:
    return type(item) in ORDINARY and item.layout == torch.strided


def _within_one_another(tensors: Mapping[int, torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs of keys, the smaller one first, of tensors whose extents overlap."""
    begun: list[tuple[int, int]] = []
    for start, end, key in sorted((*extent(tensor), key) for key, tensor in tensors.items() if tensor.numel()):
        begun = [(last, other) for last, other in begun if last > start]
        yield from ((min(key, other), max(key, other)) for _, other in begun)
        begun.append((end, key))


class Overlaps:
    """Which inputs share elements with one that is written to, and where these lie in their storages.

    inputs: of the call for which the graph was made. written: positions of those that the graph writes to. never: positions of those
    that are taken to lie in memory of their own (parameters), unless they are written to. static: whether all sizes are the same at
    every call. Thread-safe. Costs some 50 ns for each tensor while most lie where they lay.
    """

    def __init__(self, inputs: Sequence[Any], written: Collection[int], never: Collection[int], static: bool) -> None:
        self._positions = [
            position for position, item in enumerate(inputs) if _is_plain(item) and (position in written or position not in never)
        ]
        self._written = {index for index, position in enumerate(self._positions) if position in written}
        self._static = static
        self._choose = _chooser(self._positions)
        self._known: dict[Any, bool] = {}
        self._pointers: list[int] | None = None
        tensors = [inputs[position] for position in self._positions]
        self._relation = self._find(tensors)
        self._bytes = [extent(tensor)[1] - extent(tensor)[0] if tensor.numel() else 0 for tensor in tensors]

    @property
    def may_change(self) -> bool:
        """Whether there is a tensor that is written to, and another one, or other strides."""
        return bool(self._written) and (len(self._positions) > 1 or not self._static)

    @property
    def are_apart(self) -> bool:
        """Whether no tensor that is written to shared elements with another one, or within itself, when the graph was made."""
        return self._relation == NOTHING

    def are_as_before(self, inputs: Sequence[Any]) -> bool:
        """Whether the graph is right for these inputs. What holds no numbers (fake tensors) overlaps as before."""
        tensors = self._choose(inputs)
        if FakeTensor in map(type, tensors):
            return True
        pointers = addresses(tensors)
        # Where none overlapped, addresses tell all; else another storage, or another tensor's view, can have come to the same addresses.
        if self._static and self._relation == NOTHING and (pointers == self._pointers or self._are_new_apart(pointers)):
            self._pointers = pointers
            return True
        if self._find(tensors) != self._relation:
            return False
        self._pointers = pointers
        return True

    def _are_new_apart(self, pointers: list[int]) -> bool:
        """Whether no tensor overlaps another one, where none did last time and only a few are in another place."""
        known = self._pointers
        if known is None:
            return False
        moved = [index for index, (now, before) in enumerate(zip(pointers, known, strict=True)) if now != before]
        if len(moved) > _FEW:
            return False
        for index in moved:
            start, end = pointers[index], pointers[index] + self._bytes[index]
            if sum(other < end and start < other + size for other, size in zip(pointers, self._bytes, strict=True)) > 1:
                return False
        return True

    def _find(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
        """The pairs that share elements, and where each of their tensors lies in its storage."""
        pairs = sorted(
            (one, other)
            for one, other in _within_one_another(dict(enumerate(tensors)))
            if (one in self._written or other in self._written) and self._share(tensors, one, other)
        )
        if not self._static:  # else TorchDynamo's guards tell strides apart
            pairs += [(index, index) for index in sorted(self._written) if shares_with_itself(tensors[index])]
        return pairs, [(index, *_place(tensors[index])) for index in sorted({index for pair in pairs for index in pair})]

    def _share(self, tensors: Sequence[torch.Tensor], one: int, other: int) -> bool:
        mine, theirs = tensors[one], tensors[other]
        key = one, other, bytes_behind(mine, theirs), mine.shape, mine.stride(), theirs.shape, theirs.stride()
        if key not in self._known:
            if len(self._known) == _MOST_KNOWN:
                self._known = {}
            self._known[key] = share_elements(mine, theirs)
        return self._known[key]


def _chooser(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """What gives the items at these positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda items: [items[position] for position in positions]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies in its storage, and in the tensor that it is a view of: AOTAutograd begins with either."""
    base = private.base_of(tensor)
    seen = None if base is None else (base.shape, base.stride(), base.storage_offset())
    return tensor.storage_offset(), tensor.untyped_storage().nbytes(), seen


def guarded(compiled: Callable[..., Any], otherwise: Callable[..., Any], overlaps: Overlaps) -> Callable[..., Any]:
    """What calls `compiled` where inputs overlap as before, and `otherwise` where they do not."""

    def call(*args: Any) -> Any:
        return compiled(*args) if overlaps.are_as_before(args) else otherwise(*args)

    return call


def share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether tensors whose extents overlap share an element. Of several dtypes, and of more than a million elements, all do."""
    apart = bytes_behind(one, other)
    if one.dtype != other.dtype or apart % one.element_size() or max(one.numel(), other.numel()) > _MOST:
        return True
    return not set(_elements(one, 0)).isdisjoint(_elements(other, apart // one.element_size()))


def shares_with_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor have one place in memory. Of more than a million elements that nothing keeps apart, some do."""
    reach = 0
    for step, size in sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1):
        if step <= reach:
            break
        reach += (size - 1) * step
    else:
        return False
    if tensor.numel() < 2:
        return False
    return (
        tensor.numel() > _MOST
        or any(step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
        or (len(set(_elements(tensor, 0))) < tensor.numel())
    )


def _elements(tensor: torch.Tensor, start: int) -> list[int]:
    found = np.array(start)
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        found = found[..., None] + np.arange(size) * step
    return found.ravel().tolist()
