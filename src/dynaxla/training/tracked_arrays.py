"""NumPy arrays during the recording of a step: each array that is an input of the program is replaced by a view that notes its reads.

An array that Python reads is not an input: its contents are compared at every call.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import CaptureError
from ..guards.fingerprints import LARGE, size_of
from ..guards.numpy_arrays import inputs_of, tensor_of
from ..guards.observation import Effect, Refused
from ..guards.snapshot import Snapshot
from ..runtime import private

# Attributes that do not depend on an array's values.
_METADATA = frozenset(("shape", "dtype", "ndim", "size", "strides", "itemsize", "nbytes", "__class__", "__module__", "__name__", "__len__"))


class TrackedArray(np.ndarray[Any, Any]):
    """A view of an array that notes when its values are read.

    Attributes:
        dynaxla_path: the array's path.
        dynaxla_read: the set to which the path is added when the values are read.
        dynaxla_thread: the id of the only thread whose reads are noted.
    """

    def __array_finalize__(self, source: Any) -> None:
        if isinstance(source, TrackedArray):  # a view of a view, whose reads would not be noted
            _note(source)

    def __getattribute__(self, name: str) -> Any:
        if name not in _METADATA:
            _note(self)
        return np.ndarray.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _METADATA:  # it would be set on this view, not on the array
            _refuse(self, f"{name} of")
        setattr(_plain(self), name, _plain(value))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = _plain((inputs, kwargs))
        return getattr(ufunc, method)(*inputs, **kwargs)

    def __array_function__(self, function: Any, kinds: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = _plain((args, kwargs))
        return function(*args, **kwargs)


TrackedArray.__module__, TrackedArray.__qualname__, TrackedArray.__name__ = "numpy", "ndarray", "ndarray"


def _note(array: TrackedArray) -> None:
    """Notes that the recording thread reads an array.

    Raises: Refused for a large array, before it is read or written to.
    """
    state = np.ndarray.__getattribute__(array, "__dict__")
    if state.get("dynaxla_thread") == threading.get_ident():
        state["dynaxla_read"].add(state["dynaxla_path"])
        if size_of(untracked(array)) > LARGE:
            _refuse(array, "a read of the values of", ", a large array")


def _refuse(array: TrackedArray, what: str, kind: str = "") -> None:
    raise Refused(Effect(f"{what} {path_of(array)}{kind}", ""))


def _plain(value: Any) -> Any:
    """Returns nested containers with the arrays themselves in place of tracked ones, and notes that they are read."""
    if isinstance(value, TrackedArray):
        _note(value)
        return untracked(value)
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    return {key: _plain(item) for key, item in value.items()} if type(value) is dict else value


def _reading(name: str) -> Any:
    method = getattr(np.ndarray, name)

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(_plain(self), *map(_plain, args), **kwargs)

    return read


for _name, _value in vars(np.ndarray).items():  # special methods, which Python calls without asking for an attribute
    if _name.startswith("__") and callable(_value) and _name not in {*vars(TrackedArray), *vars(object), *_METADATA}:
        setattr(TrackedArray, _name, _reading(_name))
for _name in ("__repr__", "__str__", "__format__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(TrackedArray, _name, _reading(_name))


def track(array: np.ndarray[Any, Any], path: str, read: set[str]) -> TrackedArray:
    """Returns a view that adds `path` to `read` when this thread reads its values."""
    tracked = array.view(TrackedArray)
    np.ndarray.__getattribute__(tracked, "__dict__").update(dynaxla_path=path, dynaxla_read=read, dynaxla_thread=threading.get_ident())
    return tracked


def untracked(array: TrackedArray) -> np.ndarray[Any, Any]:
    """Returns the same memory as an ordinary array."""
    return np.ndarray.view(array, np.ndarray)


def mark_read(values: Any) -> None:
    """Notes that arrays in nested containers are read, by a function that does not call their methods."""
    _plain(values)


class ValuesRead(Exception):
    """Python has read the values of the arrays at `paths`."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__(f"values of {', '.join(sorted(paths))} are read")
        self.paths = paths


class TrackedArrays:
    """The tracked views that replace arrays while a step is recorded.

    Args:
        paths: the paths of the arrays whose values must not be read.
        found: the state that the recording starts from.

    Attributes:
        tensors: tensors in arrays' memory, by path.
        read: the paths of arrays whose values have been read.
    """

    def __init__(self, paths: Collection[str], found: Snapshot) -> None:
        self.read: set[str] = set()
        self._state = found
        arrays = found.arrays
        self.tensors = {path: tensor_of(arrays[path]) for path in inputs_of(arrays)}
        wanted = [path for path, array in arrays.items() if path in self.tensors.keys() & paths or size_of(array) > LARGE]
        self._tracked = {id(arrays[path]): track(arrays[path], path, self.read) for path in wanted}
        self._paths = frozenset(map(path_of, self._tracked.values()))
        self._put: dict[tuple[str, Any], Any] = {}
        self._found: set[str] = set()

    def enter(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Puts the tracked views into the arrays' places. Returns: the arguments with tracked views."""
        if not self._tracked:
            return (args, kwargs)
        for path, holder in self._state.holders.items():
            for key, value in holder.items.items():
                other = self._replaced(value)
                if other is not value:
                    holder.put(key, other)
                    self._put[path, key] = other
        self._state.given.paths |= {id(tracked): path_of(tracked) for tracked in self._tracked.values()}
        return self._replaced(args), {key: self._replaced(value) for key, value in kwargs.items()}

    def leave(self) -> None:
        """Forgets the tracked views. `Snapshot.restore` puts the arrays back into the containers."""
        for tracked in self._tracked.values():
            self._state.given.paths.pop(id(tracked), None)

    def is_one(self, place: tuple[str, Any], value: Any) -> bool:
        """True if `enter` put the value into this place."""
        return value is not None and self._put.get(place) is value

    def check(self, written: Collection[str]) -> None:
        """Checks the reads of a recording.

        Args:
            written: the paths of arrays that the graph writes to, after Python has run.

        Raises:
            ValuesRead: arrays were read, or could have been read because some reference to them was not replaced by a tracked view.
            CaptureError: Python reads an array that the graph writes to.
        """
        repeated = self._state.repeated
        lost = {path_of(tracked) for array, tracked in self._tracked.items() if array in repeated} | (self._paths - self._found)
        if paths := frozenset((self.read | lost) & self._paths):
            raise ValuesRead(paths)
        if unsafe := frozenset(written) - self._paths:
            hint = "copy the array, or read it only through tensors"
            raise CaptureError(f"the step writes to {min(unsafe)} through a tensor, and its Python code reads that array", hint=hint)

    def restore_values(self, all_of_them: bool) -> list[str]:
        """Restores the arrays' values, unless `all_of_them` is False and only other threads can have written to an array.

        Returns: the paths of the arrays whose values had changed.
        """
        quiet = frozenset() if all_of_them else self._paths - self.read
        return self._state.restore_values(quiet)

    def _replaced(self, value: Any) -> Any:
        if (tracked := self._tracked.get(id(value))) is not None:
            self._found.add(path_of(tracked))
            return tracked
        if not isinstance(value, tuple) or (type(value).__new__ is not tuple.__new__ and not hasattr(value, "_fields")):
            return value
        items = [self._replaced(item) for item in tuple.__iter__(value)]
        return tuple.__new__(type(value), items) if any(map(operator.is_not, items, tuple.__iter__(value))) else value


def path_of(array: TrackedArray) -> str:
    """Returns the path at which the walk found the array."""
    return str(np.ndarray.__getattribute__(array, "__dict__")["dynaxla_path"])


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy of a tensor in memory that torch allocates, with the same strides and storage offset."""
    with _disable_current_modes(), private.without_torch_function():
        offset, last = tensor.storage_offset(), sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        span = last + 1 if tensor.numel() else 0
        memory = torch.empty(offset + span, dtype=tensor.dtype, device=tensor.device)
        # Elements may share memory (np.broadcast_to), so the memory is copied, not the elements.
        memory[offset:].copy_(tensor.as_strided((span,), (1,), offset))
        return memory.as_strided(tensor.shape, tensor.stride(), offset)


def is_same_data(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors are equal bit for bit."""
    with _disable_current_modes(), private.without_torch_function():
        return one.numpy(force=True).tobytes() == other.numpy(force=True).tobytes()
