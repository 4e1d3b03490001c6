"""What a function reads besides its arguments, and whether that has changed: its closure, globals, attributes, and tensors among these."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..runtime import capture_lock
from ..runtime.cache import LeastRecentlyUsed
from .surroundings import Walk, storage_of, walk

# Captures of one function that are kept: for shapes, dtypes and arguments that are no arrays.
_KEPT = 64

# Which values a tensor has, as far as torch counts its writes.
State = tuple[int, int | None]


class Readings:
    """What the named roots lead to, watched. own: tensors whose values do not matter, as a call is given others.

    Attributes: captured (what was made of what is read now, by keys of the caller's).
    """

    def __init__(self, roots: dict[str, Any], own: Collection[torch.Tensor] = ()) -> None:
        self._roots = roots
        self._own = {id(tensor) for tensor in own}
        self._seen: Walk | None = None
        self._tensors: list[torch.Tensor] = []
        self._states: list[State] = []
        self._stamp = 0
        self.captured: LeastRecentlyUsed[Any] = LeastRecentlyUsed(_KEPT)

    def stamp(self) -> int:
        """A number that is another one when something has changed. Only then is everything looked for anew."""
        with capture_lock.one_at_a_time():
            if self._seen is None or list(map(state_of, self._tensors)) != self._states or not self._seen.is_unchanged():
                self._seen = walk(self._roots)
                self._tensors = [tensor for tensor in self._seen.tensors.values() if id(tensor) not in self._own]
                self._states = list(map(state_of, self._tensors))
                self._stamp += 1
                self.captured = LeastRecentlyUsed(_KEPT)
            return self._stamp


def state_of(tensor: torch.Tensor) -> State:
    """What is another one when the tensor has been written to, or has got other memory."""
    return storage_of(tensor), None if tensor.is_inference() else tensor._version
