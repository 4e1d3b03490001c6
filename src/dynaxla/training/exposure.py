"""Whatever shows Python a tensor's memory, and must wait for what computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes


def methods(*names: str) -> frozenset[Any]:
    """Those of torch.Tensor that this version of torch has."""
    return frozenset(getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name))


# Ways by which Python gets at a tensor's memory without asking the dispatcher.
_ADDRESSES = methods("data_ptr", "const_data_ptr", "mutable_data_ptr") | {torch.Tensor.__cuda_array_interface__.__get__}
# Those that give the memory itself, and not what it holds now.
_GIVES = _ADDRESSES | methods("numpy", "__array__", "__dlpack__", "untyped_storage", "storage", "_typed_storage")
EXPOSES = _GIVES | methods(
    "tolist", "__reduce_ex__", "__deepcopy__", "__repr__", "__format__", "share_memory_", "is_shared", "apply_", "map_", "map2_",
    "pin_memory", "__setstate__",
)  # fmt: skip


class Exposure(TorchFunctionMode):
    """Inside, `before` is called before Python gets at a tensor's memory, and `given` with a tensor whose memory it may keep."""

    def __init__(self, before: Callable[[], None], given: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._before, self._given = before, given

    def __torch_function__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if function in EXPOSES:
            self._before()
            with _disable_current_modes():
                result = function(*args, **(kwargs or {}))
                if function in _GIVES:
                    self._given(args[0])
                return result
        return function(*args, **(kwargs or {}))
