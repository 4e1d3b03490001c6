"""Detects value reads: Python code that reads a tensor's values or memory, which a program does not have before it has run."""

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
from ..runtime.guards import is_not_observed
from ..torch_ops import aten


def _methods(*names: str) -> frozenset[Any]:
    """Returns the methods of torch.Tensor with these names that the installed torch has."""
    return frozenset(getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name))


# Functions with which Python reads a tensor's values or its memory. A fake tensor has neither.
VALUE_READS = _methods(
    *("item", "is_nonzero", "__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__", "tolist", "numpy", "__array__"),
    *("data_ptr", "const_data_ptr", "mutable_data_ptr", "__dlpack__", "untyped_storage", "storage", "_typed_storage", "pin_memory"),
    *("__reduce_ex__", "__repr__", "__format__", "share_memory_", "apply_", "map_", "map2_", "__setstate__"),
) | {torch.is_nonzero, torch.Tensor.__cuda_array_interface__.__get__}
# Functions that replace a tensor's storage and metadata. They call no op, so a recording would not see the replacement.
DATA_ASSIGNMENTS = frozenset((torch.Tensor.data.__set__,))
_OPTIMIZERS = os.path.dirname(torch.optim.__file__) + os.sep
_VALUE_DEPENDENT_TAGS = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))
# Ops without these tags that read values: the values of a mask among the indices, or of the lengths of sequences, decide the size of the
# result.
_INDEXING = frozenset((aten.index.Tensor, aten._unsafe_index.Tensor))
_READS_LENGTHS = frozenset((aten._pack_padded_sequence.default, aten._pad_packed_sequence.default))


def _one_hot(tensor: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """Implements `torch.nn.functional.one_hot` without a value read. torch's C++ code reads values to check them.

    If `num_classes` is not given, torch's function is called, because the largest class decides the shape. torch's function is also called
    for a wrong dtype or `num_classes`, to raise its error.
    """
    if tensor.dtype != torch.int64 or num_classes <= 0:
        return torch.nn.functional.one_hot(tensor, num_classes)
    aten._assert_async.msg((tensor >= 0).all(), "Class values must be non-negative.")
    aten._assert_async.msg((tensor < num_classes).all(), "Class values must be smaller than num_classes.")
    return (tensor.contiguous()[..., None] == torch.arange(num_classes, device=tensor.device)).to(torch.int64)


# Replacements, without value reads, for functions of torch that read values only to check them. Results and errors are the same.
WITHOUT_VALUE_READS: Mapping[Any, Any] = {torch.nn.functional.one_hot: _one_hot}


class ValueReadDetector:
    """A context manager that detects value reads in this thread, in eager mode. It does not change the results of the code inside.

    torch's optimizers read their step counts. These reads are ignored: during a recording, step counts stay in tensors.

    Attributes:
        first: a message with the first value read and its line; "" if there was none.
    """

    def __init__(self) -> None:
        self.first = ""
        self._modes = _FunctionReads(self), _OpReads(self)

    def __enter__(self) -> ValueReadDetector:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)

    @is_not_observed
    def add(self, name: str) -> None:
        """Adds a read by the function `name`. Reads by torch.optim's own code are ignored."""
        if not self.first and not _is_in_torch_optim():
            where = user_frames.location()
            self.first = f"the step needs the value of a tensor in Python ({name})" + (f" at {where}" if where else "")


class _FunctionReads(TorchFunctionMode):
    def __init__(self, detector: ValueReadDetector) -> None:
        super().__init__()
        self._detector = detector

    def __torch_function__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if function in VALUE_READS or function in DATA_ASSIGNMENTS:
            self._detector.add(getattr(function, "__name__", str(function)))
        return WITHOUT_VALUE_READS.get(function, function)(*args, **(kwargs or {}))


class _OpReads(TorchDispatchMode):
    def __init__(self, detector: ValueReadDetector) -> None:
        super().__init__()
        self._detector = detector

    @is_not_observed
    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if any(map(has_own_dispatch, types)):
            return NotImplemented  # the class runs the op on its inner tensors, and those calls arrive here
        if not self._detector.first and reads_values(op, args):
            self._detector.add(str(op))
        return op(*args, **(kwargs or {}))


def reads_values(op: Any, args: Sequence[Any]) -> bool:
    """True if the shape of an op's result, or a number that the op returns to Python, depends on its operands' values."""
    if op in _INDEXING:
        return any(isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.bool, torch.uint8) for leaf in tree_leaves(args[1]))
    return op in _READS_LENGTHS or not _VALUE_DEPENDENT_TAGS.isdisjoint(op.tags)


def _is_in_torch_optim() -> bool:
    """True if torch.optim's own code is running, not user code that torch.optim calls: a closure, a hook, or the user's own optimizer."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not user_frames.is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return True
        frame = frame.f_back
    return False


def in_optimizer() -> bool:
    """True if the step of an optimizer is running. torch.optim wraps the steps of its own optimizers and of the user's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_OPTIMIZERS):
            return True
        frame = frame.f_back
    return False
