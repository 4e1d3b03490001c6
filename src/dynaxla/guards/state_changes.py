"""Detects changes to the state that a function reads besides its arguments: its closure, globals, attributes, and tensors in these."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..runtime import capture_lock
from ..runtime.cache import LeastRecentlyUsed
from .object_graph import ObjectGraph, storage_of
from .object_walker import walk

# The number of captures that are kept for one function. Their keys are shapes, dtypes, and the arguments that are no arrays.
_KEPT = 64

# Identifies a tensor's values: its storage, and torch's version counter.
State = tuple[int, int | None]


class Readings:
    """Watches everything that can be reached from named roots.

    Args:
        roots: the roots, by name.
        own: tensors whose values do not matter, because a call gets other ones.

    Attributes:
        captured: results captured from the current state, by keys that the caller chooses.
    """

    def __init__(self, roots: dict[str, Any], own: Collection[torch.Tensor] = ()) -> None:
        self._roots = roots
        self._own = {id(tensor) for tensor in own}
        self._seen: ObjectGraph | None = None
        self._tensors: list[torch.Tensor] = []
        self._states: list[State] = []
        self._stamp = 0
        self.captured: LeastRecentlyUsed[Any] = LeastRecentlyUsed(_KEPT)

    def stamp(self) -> int:
        """Returns a number that differs whenever something has changed since the last call. Only then is everything walked again."""
        with capture_lock.one_at_a_time():
            if self._seen is None or list(map(state_of, self._tensors)) != self._states or not self._seen.is_unchanged():
                self._seen = walk(self._roots)
                self._tensors = [tensor for tensor in self._seen.tensors.values() if id(tensor) not in self._own]
                self._states = list(map(state_of, self._tensors))
                self._stamp += 1
                self.captured = LeastRecentlyUsed(_KEPT)
            return self._stamp


def state_of(tensor: torch.Tensor) -> State:
    """Returns a value that differs after the tensor has been written to, or has been given other memory."""
    return storage_of(tensor), None if tensor.is_inference() else tensor._version
