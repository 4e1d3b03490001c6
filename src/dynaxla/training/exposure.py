"""Whatever shows Python a tensor's memory, and must wait for what computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

# Ways by which Python gets at a tensor's memory without asking the dispatcher.
_EXPOSES = {
    getattr(torch.Tensor, name)
    for name in (
        "numpy", "__array__", "tolist", "__dlpack__", "data_ptr", "untyped_storage", "storage", "_typed_storage", "__reduce_ex__",
        "__deepcopy__", "__repr__", "__format__", "share_memory_", "is_shared", "apply_", "map_", "map2_", "pin_memory", "__setstate__",
    )
    if hasattr(torch.Tensor, name)
}  # fmt: skip


class Exposure(TorchFunctionMode):
    """Inside, `before` is called before Python gets at a tensor's memory."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()
        self._before = before

    def __torch_function__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if function in _EXPOSES:
            self._before()
            with _disable_current_modes():
                return function(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))
