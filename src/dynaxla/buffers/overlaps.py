"""Detects inputs that share elements with an input that the graph writes to.

AOTAutograd replaces such inputs by views of one tensor, at the offsets of the traced call, so that a write to one view changes the other
views. This is not enough in two cases:

- AOTAutograd misses some overlaps. It assumes that tensors with different storages share nothing. With torch 2.13 it also misses the
  overlap of a matrix and a block of it: `compute_overlapping_tensors([m[1:, :2], m])` is empty.
- In a later call, tensors may overlap in another way: TorchDynamo's guards do not check addresses.

In both cases the graph would miss a write to shared elements, or apply the write at the wrong offset.

A tensor can also share elements with itself, if it is expanded or has overlapping windows. A write to one of its elements then changes
other elements, which a functional graph cannot express.
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
from .addresses import addresses, byte_distance, extent

# Elements are compared one by one in tensors of at most this many elements. Larger tensors with overlapping extents count as overlapping.
_MAX_COMPARED_ELEMENTS = 1 << 20
# An `AliasGuard` remembers at most this many answers of `share_elements`, one for each distance between two inputs. (Rows of a ring
# buffer have many distances.)
_MAX_CACHED_PAIRS = 1024
# If sizes are static, the traced inputs did not overlap, and at most this many tensors have new addresses, `AliasGuard.check` compares only
# the extents of these tensors with those of all others. It compares all pairs only if such extents overlap.
_MAX_MOVED = 4
# The result of `AliasGuard._find_overlaps` if no tensor shares elements with a written tensor.
_NO_OVERLAP: Any = ([], [])


def undetected_overlaps(inputs: Sequence[Any]) -> set[int]:
    """Returns the positions of inputs that share elements with another input, where AOTAutograd does not detect this."""
    positions: set[int] = set()
    for first, second in _overlapping_extents({position: item for position, item in enumerate(inputs) if _is_ordinary(item)}):
        if not _aot_autograd_detects(inputs[first], inputs[second]) and share_elements(inputs[first], inputs[second]):
            positions |= {first, second}
    return positions


def internally_overlapping(inputs: Sequence[Any]) -> set[int]:
    """Returns the positions of the inputs that have two elements at the same address."""
    return {position for position, item in enumerate(inputs) if _is_ordinary(item) and has_internal_overlap(item)}


def _aot_autograd_detects(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if AOTAutograd treats two tensors with overlapping extents as tensors that share elements."""
    if private.storage_id(first) != private.storage_id(second):
        return False
    return private.overlapping is None or bool(private.overlapping([first, second], symbolic=False))


def _is_ordinary(item: Any) -> bool:
    """True for a strided tensor of an ordinary class, not a subclass with its own semantics."""
    return type(item) in ORDINARY and item.layout == torch.strided


def _overlapping_extents(tensors: Mapping[int, torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yields the keys of each pair of tensors whose extents overlap, the smaller key first."""
    open_extents: list[tuple[int, int]] = []  # (end, key) of each earlier extent that ends after the current start
    for start, end, key in sorted((*extent(tensor), key) for key, tensor in tensors.items() if tensor.numel()):
        open_extents = [(earlier_end, earlier_key) for earlier_end, earlier_key in open_extents if earlier_end > start]
        yield from ((min(key, earlier_key), max(key, earlier_key)) for _, earlier_key in open_extents)
        open_extents.append((end, key))


class AliasGuard:
    """A guard on the pairs of inputs that share elements, and of which the graph writes to at least one. Thread-safe.

    The guard holds if these pairs are those of the traced call, and if each tensor of a pair has the same place in memory
    (`_memory_position`). A check takes about 50 ns per tensor if sizes are static, the traced inputs did not overlap, and at most
    `_MAX_MOVED` tensors have new addresses since the last call. Otherwise it compares all extents.

    Args:
        inputs: The inputs of the call for which the graph was traced.
        written: The positions of the inputs that the graph writes to.
        parameters: The positions of parameters and buffers of modules. The guard assumes that a parameter which the graph does not write to
            shares no elements with written inputs.
        static: True if all sizes are the same at every call.
    """

    def __init__(self, inputs: Sequence[Any], written: Collection[int], parameters: Collection[int], static: bool) -> None:
        self._positions = [
            position for position, item in enumerate(inputs) if _is_ordinary(item) and (position in written or position not in parameters)
        ]
        self._written = {index for index, position in enumerate(self._positions) if position in written}
        self._static = static
        self._select = _selector(self._positions)
        self._cached_answers: dict[Any, bool] = {}
        self._last_addresses: list[int] | None = None
        tensors = [inputs[position] for position in self._positions]
        self._traced_overlaps = self._find_overlaps(tensors)
        self._extent_bytes = [extent(tensor)[1] - extent(tensor)[0] if tensor.numel() else 0 for tensor in tensors]

    @property
    def is_needed(self) -> bool:
        """True if the inputs of a later call may overlap in another way than the traced inputs.

        That is possible if the graph writes to an input, and either has another input or has dynamic sizes.
        """
        return bool(self._written) and (len(self._positions) > 1 or not self._static)

    @property
    def found_no_overlap(self) -> bool:
        """True if no written input shared elements with another input when the graph was traced.

        If sizes are not static, it is False also if a written input overlapped itself.
        """
        return self._traced_overlaps == _NO_OVERLAP

    def check(self, inputs: Sequence[Any]) -> bool:
        """True if these inputs overlap as the traced inputs did. Always true for fake tensors, which have no memory."""
        tensors = self._select(inputs)
        if FakeTensor in map(type, tensors):
            return True
        current = addresses(tensors)
        # Without overlaps, equal addresses and static sizes mean that nothing has changed. With overlaps, a tensor at the same address can
        # have another storage offset or base, which `_find_overlaps` compares.
        if (
            self._static
            and self._traced_overlaps == _NO_OVERLAP
            and (current == self._last_addresses or self._moved_tensors_are_apart(current))
        ):
            self._last_addresses = current
            return True
        if self._find_overlaps(tensors) != self._traced_overlaps:
            return False
        self._last_addresses = current
        return True

    def _moved_tensors_are_apart(self, current: list[int]) -> bool:
        """True if at most `_MAX_MOVED` tensors have new addresses, and the extent of each of these overlaps no other tensor's extent.

        Valid only if no written tensor overlapped another tensor at the last call.

        Args:
            current: The address of each tensor.
        """
        last = self._last_addresses
        if last is None:
            return False
        moved = [index for index, (now, before) in enumerate(zip(current, last, strict=True)) if now != before]
        if len(moved) > _MAX_MOVED:
            return False
        for index in moved:
            start, end = current[index], current[index] + self._extent_bytes[index]
            # The sum counts the tensor itself, too.
            if sum(address < end and start < address + size for address, size in zip(current, self._extent_bytes, strict=True)) > 1:
                return False
        return True

    def _find_overlaps(self, tensors: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
        """Returns the pairs of tensors that share elements, and `_memory_position` of each tensor in a pair.

        The graph writes to at least one tensor of a pair. If sizes are dynamic, a written tensor that overlaps itself is a pair of its own.
        """
        pairs = sorted(
            (first, second)
            for first, second in _overlapping_extents(dict(enumerate(tensors)))
            if (first in self._written or second in self._written) and self._share(tensors, first, second)
        )
        if not self._static:  # for static sizes, TorchDynamo guards the strides
            pairs += [(index, index) for index in sorted(self._written) if has_internal_overlap(tensors[index])]
        return pairs, [(index, *_memory_position(tensors[index])) for index in sorted({index for pair in pairs for index in pair})]

    def _share(self, tensors: Sequence[torch.Tensor], first_index: int, second_index: int) -> bool:
        """Returns `share_elements` of two tensors, from the cache if possible."""
        first, second = tensors[first_index], tensors[second_index]
        key = first_index, second_index, byte_distance(first, second), first.shape, first.stride(), second.shape, second.stride()
        if key not in self._cached_answers:
            if len(self._cached_answers) == _MAX_CACHED_PAIRS:
                self._cached_answers = {}
            self._cached_answers[key] = share_elements(first, second)
        return self._cached_answers[key]


def _selector(positions: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns a function that selects the items at these positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda items: [items[position] for position in positions]


def _memory_position(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a tensor's storage offset, the size of its storage, and the shape, strides and storage offset of its base.

    AOTAutograd recreates a view either from its storage or from its base, so the graph depends on all of these.
    """
    base = private.base_of(tensor)
    base_metadata = None if base is None else (base.shape, base.stride(), base.storage_offset())
    return tensor.storage_offset(), tensor.untyped_storage().nbytes(), base_metadata


def guarded(compiled: Callable[..., Any], fallback: Callable[..., Any], guard: AliasGuard) -> Callable[..., Any]:
    """Returns a function that calls `compiled` if the inputs overlap as the traced inputs did, and otherwise `fallback`."""

    def call(*args: Any) -> Any:
        return compiled(*args) if guard.check(args) else fallback(*args)

    return call


def share_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two tensors with overlapping extents share an element.

    Also True without a comparison if the dtypes differ, if the distance is not a whole number of elements, or if one tensor has more than
    `_MAX_COMPARED_ELEMENTS` elements.
    """
    distance = byte_distance(first, second)
    if first.dtype != second.dtype or distance % first.element_size() or max(first.numel(), second.numel()) > _MAX_COMPARED_ELEMENTS:
        return True
    return not set(_element_offsets(first, 0)).isdisjoint(_element_offsets(second, distance // first.element_size()))


def has_internal_overlap(tensor: torch.Tensor) -> bool:
    """True if two elements of a tensor have the same address.

    Also True, without a comparison, for a tensor of more than `_MAX_COMPARED_ELEMENTS` elements whose sizes and strides do not exclude an
    overlap.
    """
    # `reach` is the distance from the first to the last element of the dimensions with smaller strides. If each stride is larger than the
    # reach, no two elements have the same address.
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
        tensor.numel() > _MAX_COMPARED_ELEMENTS
        or any(step == 0 for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size != 1)
        or (len(set(_element_offsets(tensor, 0))) < tensor.numel())
    )


def _element_offsets(tensor: torch.Tensor, start: int) -> list[int]:
    """Returns the offset of each element in memory, in elements. The first element has the offset `start`."""
    offsets = np.array(start)
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = offsets[..., None] + np.arange(size) * step
    return offsets.ravel().tolist()
