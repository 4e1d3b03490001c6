"""Looks: requests of Python code for a tensor's values or memory, which no program can answer before it has run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .. import user_frames
from ..guards.dispatch import has_own_dispatch
from ..torch_ops import aten


def _methods(*names: str) -> frozenset[Any]:
    """Returns the methods of torch.Tensor with these names, as far as the installed torch has them."""
    return frozenset(getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name))


# Functions by which Python asks for a tensor's values, or for its memory, which a fake tensor does not have.
LOOKS = _methods(
    *("item", "is_nonzero", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "tolist", "numpy", "__array__"),
    *("data_ptr", "const_data_ptr", "mutable_data_ptr", "__dlpack__", "untyped_storage", "storage", "_typed_storage", "pin_memory"),
    *("__reduce_ex__", "__repr__", "__format__", "share_memory_", "apply_", "map_", "map2_", "__setstate__"),
) | {torch.is_nonzero, torch.Tensor.__cuda_array_interface__.__get__}
# Functions that replace a tensor's identity (storage and metadata), which no op does.
REPLACES = frozenset((torch.Tensor.data.__set__,))
_OPTIMIZERS = os.path.dirname(torch.optim.__file__) + os.sep
_VALUES_DECIDE = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
# Ops that read values although their tags do not say so: masks among the indices, which give the size of the result, and lengths.
_INDEXING = frozenset((aten.index.Tensor, aten._unsafe_index.Tensor))
_READS_LENGTHS = frozenset((aten._pack_padded_sequence.default, aten._pad_packed_sequence.default))


class Looks:
    """A context that notes, in this thread, the looks of a function that runs in eager mode; the function's results do not change.

    Looks of torch's optimizers at their step counts are left out: during a recording, these counts stay in tensors.

    Attributes:
        first: a message with the first look and its line; "" if there was none.
    """

    def __init__(self) -> None:
        self.first = ""
        self._modes = _FunctionLooks(self), _Ops(self)

    def __enter__(self) -> Looks:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    def note(self, name: str) -> None:
        """Notes a look, unless an optimizer of torch's takes it itself."""
        if not self.first and not _is_optimizers_own():
            found = user_frames.innermost()
            where = "" if found is None else " at {}:{}, in {}".format(*found)
            self.first = f"the step needs the value of a tensor in Python ({name}){where}"


class _FunctionLooks(TorchFunctionMode):
    def __init__(self, looks: Looks) -> None:
        super().__init__()
        self._looks = looks

    def __torch_function__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if function in LOOKS or function in REPLACES:
            self._looks.note(getattr(function, "__name__", str(function)))
        return function(*args, **(kwargs or {}))


class _Ops(TorchDispatchMode):
    def __init__(self, looks: Looks) -> None:
        super().__init__()
        self._looks = looks

    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if any(map(has_own_dispatch, types)):
            return NotImplemented  # the class runs the op on its inner tensors, and those calls arrive here
        if not self._looks.first and asks_for_values(op, args):
            self._looks.note(str(op))
        return op(*args, **(kwargs or {}))


def asks_for_values(op: Any, args: Sequence[Any]) -> bool:
    """True if the shape of an op's result, or a number that it returns to Python, depends on its operands' values."""
    if op in _INDEXING:
        return any(isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1]))
    return op in _READS_LENGTHS or not _VALUES_DECIDE.isdisjoint(op.tags)


def _is_optimizers_own() -> bool:
    """True if torch.optim runs its own code, and no user code that it calls: no closure, hook or optimizer of the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not user_frames.is_users(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return True
        frame = frame.f_back
    return False


def in_optimizer() -> bool:
    """True if an optimizer's step is running, torch's or the user's own: torch.optim wraps both."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return True
        frame = frame.f_back
    return False


# Code of this module, which an observation of the function ignores.
HANDLERS = (_Ops.__torch_dispatch__.__code__, Looks.note.__code__)
