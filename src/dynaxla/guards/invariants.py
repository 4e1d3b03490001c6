"""Detects and undoes changes of objects' classes, and of tensors' attributes, memory and `requires_grad`, during a recording.

Neither the recorded graph nor the entries of containers show these changes.
"""

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
    """The classes of objects and the metadata of tensors before a recording."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, Any]) -> None:
        self._tensors = dict(tensors)
        self._classes = [(path, value, type(value)) for path, value in objects.items()]
        self._requires_grad = {path: tensor.requires_grad for path, tensor in tensors.items()}
        self._without_attributes = [path for path, tensor in tensors.items() if not _attributes(tensor)]
        with _disable_current_modes(), private.without_torch_function():
            self._aliases = {path: tensor.detach() for path, tensor in tensors.items() if type(tensor) in ORDINARY}

    def check(self) -> None:
        """Raises: CaptureError for a change since the snapshot that a program would not repeat."""
        if path := next((path for path in self._with_changed_requires_grad() if not self._tensors[path].is_leaf), None):
            raise CaptureError(
                f"the step writes a value that requires gradients to {path}", hint="detach the values that the step writes to this tensor"
            )
        if path := next(self._with_changed_memory(), None):
            raise CaptureError(f"the step replaces the memory of {path}", hint="copy into the tensor: x.data.copy_(y)")
        if found := next(self._with_changed_class(), None):
            raise CaptureError(f"the step changes the class of {found[0]}", hint="change the class outside the step")
        if path := next(self._with_new_attributes(), None):
            raise CaptureError(f"the step sets an attribute of {path}, which had no attributes before")

    def requires_grad_changes(self) -> list[torch.Tensor]:
        """Returns the leaf tensors whose `requires_grad` the step has changed."""
        return [self._tensors[path] for path in self._with_changed_requires_grad() if self._tensors[path].is_leaf]

    def restore(self) -> None:
        """Restores the tensors and objects to their state before the recording."""
        for path in list(self._with_changed_memory()):
            with _disable_current_modes(), private.without_torch_function():
                self._tensors[path].data = self._aliases[path]
        for path in list(self._with_new_attributes()):
            _attributes(self._tensors[path]).clear()
        for path in list(self._with_changed_requires_grad()):
            tensor = self._tensors[path]
            if tensor.grad_fn is not None:
                tensor.detach_()
            tensor.requires_grad_(self._requires_grad[path])
        for _, value, kind in list(self._with_changed_class()):
            object.__setattr__(value, "__class__", kind)

    def _with_changed_class(self) -> Iterator[tuple[str, Any, type]]:
        return (found for found in self._classes if type(found[1]) is not found[2])

    def _with_changed_requires_grad(self) -> Iterator[str]:
        return (path for path, tensor in self._tensors.items() if tensor.requires_grad != self._requires_grad[path])

    def _with_changed_memory(self) -> Iterator[str]:
        return (path for path, data in self._aliases.items() if storage_of(self._tensors[path]) != storage_of(data))

    def _with_new_attributes(self) -> Iterator[str]:
        return (path for path in self._without_attributes if _attributes(self._tensors[path]))


def _attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """Returns a tensor's Python attributes, without creating the `__dict__` of a tensor that has none."""
    dicts = [item for item in gc.get_referents(tensor) if type(item) is dict]
    return next((item for item in dicts if item is tensor.__dict__), {}) if dicts else {}
