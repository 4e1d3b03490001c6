"""Detects changes to the state that a function reads besides its arguments: closure, globals, attributes, and the tensors in them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from ..runtime import capture_lock
from ..runtime.cache import LeastRecentlyUsed
from .object_graph import ObjectGraph, storage_of
from .object_walker import walk

# The maximum number of captured results of one function.
_MAX_CAPTURED = 64

# Identifies a tensor's values: the id of its storage, and torch's version counter (None for an inference tensor, which has none).
TensorVersion = tuple[int, int | None]


class StateChangeDetector:
    """Detects changes of all objects that can be reached from named roots.

    Args:
        roots: the roots, by name.
        ignored: tensors whose values are not compared, because each call puts its own tensors in their places.

    Attributes:
        captured: the caller's results for the current state, by the caller's keys. A change of the state clears the results.
    """

    def __init__(self, roots: dict[str, Any], ignored: Collection[torch.Tensor] = ()) -> None:
        self._roots = roots
        self._ignored_ids = {id(tensor) for tensor in ignored}
        self._graph: ObjectGraph | None = None
        self._tensors: list[torch.Tensor] = []
        self._versions: list[TensorVersion] = []
        self._stamp = 0
        self.captured: LeastRecentlyUsed[Any] = LeastRecentlyUsed(_MAX_CAPTURED)

    def stamp(self) -> int:
        """Returns a number, which is larger than at the last call if an object has changed. Without a change there is no new walk."""
        with capture_lock.exclusive():
            if self._graph is None or list(map(version_of, self._tensors)) != self._versions or not self._graph.is_unchanged():
                self._graph = walk(self._roots)
                self._tensors = [tensor for tensor in self._graph.tensors.values() if id(tensor) not in self._ignored_ids]
                self._versions = list(map(version_of, self._tensors))
                self._stamp += 1
                self.captured = LeastRecentlyUsed(_MAX_CAPTURED)
            return self._stamp


def version_of(tensor: torch.Tensor) -> TensorVersion:
    """Returns a value that changes when the tensor is written to, or gets other memory."""
    return storage_of(tensor), None if tensor.is_inference() else tensor._version
