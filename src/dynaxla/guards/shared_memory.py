"""Memory that a tensor shares with an object that Python reads and writes without torch: a NumPy array, bytearray or memoryview."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..runtime import private


def is_foreign(tensor: torch.Tensor) -> bool:
    """True if torch has not allocated a tensor's memory: the memory may be that of a NumPy array or of a mapped file of weights."""
    with private.without_torch_function():
        return not tensor.untyped_storage().resizable()


def pairs_sharing_memory(buffer_objects: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Returns the pairs that may share memory: the path of an array, bytearray or memoryview, and the path of a tensor.

    Args:
        buffer_objects: arrays, bytearrays and memoryviews by path.
        tensors: tensors by path.
    """
    if not buffer_objects:
        return []
    storages = {path: memory for path, tensor in tensors.items() if (memory := _memory(tensor)) is not None}
    arrays = {path: np.asarray(value if isinstance(value, np.ndarray) else memoryview(value)) for path, value in buffer_objects.items()}
    return [
        (path, tensor_path)
        for path, array in arrays.items()
        for tensor_path, memory in storages.items()
        if np.may_share_memory(array, memory)
    ]


def _memory(tensor: torch.Tensor) -> np.ndarray[Any, Any] | None:
    """Returns all bytes of a tensor's storage as an array; None for a tensor that is not strided or not on the CPU."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        return None
    with _disable_current_modes(), private.without_torch_function():
        return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
