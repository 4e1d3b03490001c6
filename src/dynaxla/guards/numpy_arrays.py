"""Finds NumPy arrays that can be inputs of a program, as tensors that share the arrays' memory.

Also detects code that could read an array's values without the recording noticing it (training/tracked_arrays.py).
"""

from __future__ import annotations

import types
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .code_names import names_of
from .trusted_code import is_trusted_namespace, module_of

_DTYPES = frozenset(map(np.dtype, ("b1", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16")))
# Names with which code could read an array's memory without calling its methods, or could distinguish an array from the `TrackedArray` that
# replaces it during a recording (training/tracked_arrays.py).
_UNNOTICED_READERS = frozenset(("type", "memoryview", "bytes", "bytearray", "array", "struct", "ctypes", "numpy", "__class__"))


def inputs_of(arrays: Mapping[str, np.ndarray[Any, Any]], compared: Collection[str] = ()) -> frozenset[str]:
    """Returns the paths of the arrays that can be inputs of a program.

    torch supports the dtype and the strides of such an array, and no other array that could be an input overlaps it in memory.

    Args:
        arrays: arrays by path.
        compared: the paths of arrays whose values are guarded instead. These arrays are no inputs.
    """
    candidates = {path: array for path, array in arrays.items() if path not in compared and _is_plain(array)}
    if len(candidates) < 2:
        return frozenset(candidates)
    ranges: list[tuple[int, int, str]] = sorted((*np.lib.array_utils.byte_bounds(array), path) for path, array in candidates.items())
    overlapping: set[str] = set()
    end, last = -1, ""
    for start, stop, path in ranges:
        if start < end and stop > start:
            overlapping |= {last, path}
        if stop > end:
            end, last = stop, path
    return frozenset(candidates.keys() - overlapping)


def _is_plain(array: np.ndarray[Any, Any]) -> bool:
    """True for a writeable NumPy array, not of a subclass, whose dtype and strides torch supports."""
    return (
        type(array) is np.ndarray
        and array.dtype in _DTYPES
        and array.dtype.isnative
        and array.flags.writeable
        and array.flags.aligned
        and all(stride >= 0 and not stride % array.itemsize for stride in array.strides)
    )


def could_read_unnoticed(executed: Mapping[types.CodeType, Sequence[dict[str, Any]]]) -> bool:
    """True if executed untrusted code names a function or class that could read an array without calling the array's methods."""
    return any(
        not _UNNOTICED_READERS.isdisjoint(name.partition(".")[0] for name in (*names.globals, *names.imports))
        or "__class__" in names.all
        or any(_is_of_numpy(values.get(name)) for name in names.globals)
        for code, namespaces in executed.items()
        if (names := names_of(code))
        for values in _untrusted(namespaces)
    )


def _untrusted(namespaces: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (values for values in namespaces if not is_trusted_namespace(values))


def _is_of_numpy(value: Any) -> bool:
    """True for the module numpy, its submodules, and functions and classes that they define."""
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None) or module_of(type(value))
    return isinstance(module, str) and module.partition(".")[0] == "numpy" and not isinstance(value, np.ndarray)


def tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Returns a tensor that shares the array's memory."""
    return torch.from_numpy(array)
