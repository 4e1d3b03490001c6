"""Detects inputs that share elements if one of them is written to.

AOTAutograd turns such inputs into views of one tensor, at their positions when the graph is traced, so that each sees the writes to the
others. It assumes that some tensors share nothing: tensors with different storages, and with torch 2.13 a block of rows and columns and the
whole matrix (`compute_overlapping_tensors([m[1:, :2], m])` is empty). And TorchDynamo's guards do not check the addresses of a later call's
tensors: the graph would not apply a write to one tensor to the other, or apply it at the wrong position.

A tensor whose own elements share memory (expanded, or with overlapping windows) is such a case by itself: a write to one of its elements is
a write to others, which a functional graph cannot express.
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

# In elements. Two larger tensors whose extents overlap are assumed to share elements.
_MOST = 1 << 20
# The maximum number of cached answers about pairs of tensors. In a ring buffer of rows, each distance between rows is one of them.
_MOST_KNOWN = 1024
# Up to this many tensors with new addresses are compared with all others one by one.
_FEW = 4
# The result of `Overlaps._find` if no two tensors share elements.
NOTHING: Any = ([], [])


def overlooked(inputs: Sequence[Any]) -> set[int]:
    """Returns the positions of tensors that share elements with another one, although AOTAutograd will not see it."""
    found: set[int] = set()
    for one, other in _within_one_another({position: item for position, item in enumerate(inputs) if _is_plain(item)}):
        if not _torch_finds(inputs[one], inputs[other]) and share_elements(inputs[one], inputs[other]):
            found |= {one, other}
    return found


def folded(inputs: Sequence[Any]) -> set[int]:
    """Returns the positions of tensors with two elements at the same address."""
    return {position for position, item in enumerate(inputs) if _is_plain(item) and shares_with_itself(item)}


def _torch_finds(one: torch.Tensor, other: torch.Tensor) -> bool:
    if private.storage_id(one) != private.storage_id(other):
        return False
    return private.overlapping is None or bool(private.overlapping([one, other], symbolic=False))


def _is_plain(item: Any) -> bool:
    return type(item) in ORDINARY and item.layout == torch.strided


def _within_one_another(tensors: Mapping[int, torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Yields pairs of keys, the smaller one first, of tensors whose extents overlap."""
    begun: list[tuple[int, int]] = []
    for start, end, key in sorted((*extent(tensor), key) for key, tensor in tensors.items() if tensor.numel()):
        begun = [(last, other) for last, other in begun if last > start]
        yield from ((min(key, other), max(key, other)) for _, other in begun)
        begun.append((end, key))


class Overlaps:
    """A guard on the inputs that share elements with a written input, and on their positions in their storages.

    Thread-safe. Costs about 50 ns for each tensor while most of them keep their addresses.

    Args:
        inputs: The inputs of the call for which the graph was traced.
        written: The positions of the inputs that the graph writes to.
        never: The positions of inputs that are assumed to have their own memory (parameters), unless they are written to.
        static: True if all sizes are the same at every call.
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
        """True if some tensor is written to, and there is another tensor, or its strides may change."""
        return bool(self._written) and (len(self._positions) > 1 or not self._static)

    @property
    def are_apart(self) -> bool:
        """True if no written tensor shared elements with another one, or within itself, when the graph was traced."""
        return self._relation == NOTHING

    def are_as_before(self, inputs: Sequence[Any]) -> bool:
        """True if the graph is valid for these inputs. Fake tensors, which have no memory, count as unchanged."""
        tensors = self._choose(inputs)
        if FakeTensor in map(type, tensors):
            return True
        pointers = addresses(tensors)
        # If none overlapped, equal addresses are enough. Otherwise another storage, or a view of another tensor, may have the same address.
        if self._static and self._relation == NOTHING and (pointers == self._pointers or self._are_new_apart(pointers)):
            self._pointers = pointers
            return True
        if self._find(tensors) != self._relation:
            return False
        self._pointers = pointers
        return True

    def _are_new_apart(self, pointers: list[int]) -> bool:
        """True if no tensor overlaps another one, provided that none did last time and that only a few have another address."""
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
        """Returns the pairs that share elements, and the position of each of their tensors in its storage."""
        pairs = sorted(
            (one, other)
            for one, other in _within_one_another(dict(enumerate(tensors)))
            if (one in self._written or other in self._written) and self._share(tensors, one, other)
        )
        if not self._static:  # for static sizes TorchDynamo guards on the strides
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
    """Returns a function that selects the items at these positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda items: [items[position] for position in positions]


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns a tensor's position in its storage and in its base, since AOTAutograd starts from either."""
    base = private.base_of(tensor)
    seen = None if base is None else (base.shape, base.stride(), base.storage_offset())
    return tensor.storage_offset(), tensor.untyped_storage().nbytes(), seen


def guarded(compiled: Callable[..., Any], otherwise: Callable[..., Any], overlaps: Overlaps) -> Callable[..., Any]:
    """Returns a function that calls `compiled` where inputs overlap as they did for the trace, and `otherwise` where they do not."""

    def call(*args: Any) -> Any:
        return compiled(*args) if overlaps.are_as_before(args) else otherwise(*args)

    return call


def share_elements(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if tensors whose extents overlap share an element. Assumed for different dtypes, and for more than `_MOST` elements."""
    apart = bytes_behind(one, other)
    if one.dtype != other.dtype or apart % one.element_size() or max(one.numel(), other.numel()) > _MOST:
        return True
    return not set(_elements(one, 0)).isdisjoint(_elements(other, apart // one.element_size()))


def shares_with_itself(tensor: torch.Tensor) -> bool:
    """True if two elements of a tensor have the same address. Assumed for more than `_MOST` elements, unless the strides exclude it."""
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
