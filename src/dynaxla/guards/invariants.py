"""Detects and restores changes that neither the recorded graph nor the entries of containers show: to the classes of objects, and to the
attributes, the memory and `requires_grad` of tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import CaptureError
from ..runtime import private
from ..runtime.layout import ORDINARY
from .object_graph import storage_of


class MetadataSnapshot:
    """A snapshot of tensors and other objects, by path, before a recording."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, Any]) -> None:
        self._tensors = dict(tensors)
        self._classes = [(path, value, type(value)) for path, value in objects.items()]
        self._flags = {path: tensor.requires_grad for path, tensor in tensors.items()}
        self._bare = [path for path, tensor in tensors.items() if not _attributes(tensor)]
        with _disable_current_modes(), private.without_torch_function():
            self._data = {path: tensor.detach() for path, tensor in tensors.items() if type(tensor) in ORDINARY}

    def check(self) -> None:
        """Raises: CaptureError for a change, which a program would not repeat."""
        if path := next(self._required(), None):
            hint = "detach the values that are written to it, or set requires_grad outside the step"
            raise CaptureError(f"the step changes requires_grad of {path}", hint=hint)
        if path := next(self._replaced(), None):
            raise CaptureError(f"the step replaces the memory of {path}", hint="copy into it: x.data.copy_(y)")
        if found := next(self._others(), None):
            raise CaptureError(f"the step changes the class of {found[0]}", hint="change it outside the step")
        if path := next(self._marked(), None):
            raise CaptureError(f"the step sets an attribute of {path}, which had no attributes before")

    def restore(self) -> None:
        """Restores the tensors and objects to the snapshot."""
        for path in list(self._replaced()):
            with _disable_current_modes(), private.without_torch_function():
                self._tensors[path].data = self._data[path]
        for path in list(self._marked()):
            _attributes(self._tensors[path]).clear()
        for path in list(self._required()):
            tensor = self._tensors[path]
            if tensor.grad_fn is not None:
                tensor.detach_()
            tensor.requires_grad_(self._flags[path])
        for _, value, kind in list(self._others()):
            object.__setattr__(value, "__class__", kind)

    def _others(self) -> Iterator[tuple[str, Any, type]]:
        return (found for found in self._classes if type(found[1]) is not found[2])

    def _required(self) -> Iterator[str]:
        return (path for path, tensor in self._tensors.items() if tensor.requires_grad != self._flags[path])

    def _replaced(self) -> Iterator[str]:
        return (path for path, data in self._data.items() if storage_of(self._tensors[path]) != storage_of(data))

    def _marked(self) -> Iterator[str]:
        return (path for path in self._bare if _attributes(self._tensors[path]))


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns a tensor's Python attributes, without creating the `__dict__` of a tensor that has none."""
    dicts = [item for item in gc.get_referents(tensor) if type(item) is dict]
    return next((item for item in dicts if item is tensor.__dict__), {}) if dicts else {}
