"""NumPy arrays during the recording of a step.

An array may be an input of the program only if Python does not read its values: the contents of an array that Python reads are compared at
every call. So during a recording each array that may be an input is replaced by a view that records reads.
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
from ..guards.fingerprints import MAX_COMPARED_BYTES, size_of
from ..guards.numpy_arrays import inputs_of, tensor_of
from ..guards.observation import Effect, Refused
from ..guards.snapshot import Snapshot
from ..runtime import private

# Attributes that do not depend on an array's values.
_METADATA = frozenset(("shape", "dtype", "ndim", "size", "strides", "itemsize", "nbytes", "__class__", "__module__", "__name__", "__len__"))


class TrackedArray(np.ndarray[Any, Any]):
    """A view of an array that records reads of its values.

    Attributes:
        dynaxla_path: the array's path.
        dynaxla_read: the set to which the path is added when the values are read.
        dynaxla_thread: the id of the thread whose reads are recorded.
    """

    def __array_finalize__(self, source: Any) -> None:
        if isinstance(source, TrackedArray):  # a new view of a tracked array counts as a read, because reads of the view are not recorded
            _record_read(source)

    def __getattribute__(self, name: str) -> Any:
        if name not in _METADATA:
            _record_read(self)
        return np.ndarray.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _METADATA:  # the assignment would change this view, not the array
            _refuse(self, f"{name} of")
        setattr(_plain(self), name, _plain(value))

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        inputs, kwargs = _plain((inputs, kwargs))
        return getattr(ufunc, method)(*inputs, **kwargs)

    def __array_function__(self, function: Any, kinds: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = _plain((args, kwargs))
        return function(*args, **kwargs)


TrackedArray.__module__, TrackedArray.__qualname__, TrackedArray.__name__ = "numpy", "ndarray", "ndarray"


def _record_read(array: TrackedArray) -> None:
    """Records that the current thread is about to read an array, if it is the recording thread.

    Raises: Refused for an array of more than `MAX_COMPARED_BYTES`, whose values cannot be compared at every call.
    """
    state = np.ndarray.__getattribute__(array, "__dict__")
    if state.get("dynaxla_thread") == threading.get_ident():
        state["dynaxla_read"].add(state["dynaxla_path"])
        if size_of(untracked(array)) > MAX_COMPARED_BYTES:
            _refuse(array, "a read of the values of", ", a large array")


def _refuse(array: TrackedArray, action: str, detail: str = "") -> None:
    raise Refused(Effect(f"{action} {path_of(array)}{detail}", ""))


def _plain(value: Any) -> Any:
    """Returns nested containers with plain arrays in place of tracked arrays, and records a read of each tracked array."""
    if isinstance(value, TrackedArray):
        _record_read(value)
        return untracked(value)
    if type(value) in (tuple, list):
        return type(value)(map(_plain, value))
    return {key: _plain(item) for key, item in value.items()} if type(value) is dict else value


def _recording_method(name: str) -> Any:
    method = getattr(np.ndarray, name)

    def read(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(_plain(self), *map(_plain, args), **kwargs)

    return read


# Python calls special methods without `__getattribute__`, so each of them records a read itself.
for _name, _value in vars(np.ndarray).items():
    if _name.startswith("__") and callable(_value) and _name not in {*vars(TrackedArray), *vars(object), *_METADATA}:
        setattr(TrackedArray, _name, _recording_method(_name))
for _name in ("__repr__", "__str__", "__format__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(TrackedArray, _name, _recording_method(_name))


def track(array: np.ndarray[Any, Any], path: str, read: set[str]) -> TrackedArray:
    """Returns a view that adds `path` to `read` when this thread reads the array's values."""
    tracked = array.view(TrackedArray)
    np.ndarray.__getattribute__(tracked, "__dict__").update(dynaxla_path=path, dynaxla_read=read, dynaxla_thread=threading.get_ident())
    return tracked


def untracked(array: TrackedArray) -> np.ndarray[Any, Any]:
    """Returns a plain array on the same memory."""
    return np.ndarray.view(array, np.ndarray)


def mark_read(values: Any) -> None:
    """Records reads of all tracked arrays in nested containers. Call it before a function that reads arrays without their methods."""
    _plain(values)


class ValuesRead(Exception):
    """Raised when Python has read the values of the arrays at `paths`."""

    def __init__(self, paths: frozenset[str]) -> None:
        super().__init__(f"values of {', '.join(sorted(paths))} are read")
        self.paths = paths


class TrackedArrays:
    """The tracked views that replace arrays while a step is recorded.

    Args:
        paths: the paths of the arrays that may be inputs of the program, if the recording does not read their values.
        snapshot: the state before the recording.

    Attributes:
        tensors: tensors that share the memory of arrays, by path.
        read: the paths of arrays whose values have been read.
    """

    def __init__(self, paths: Collection[str], snapshot: Snapshot) -> None:
        self.read: set[str] = set()
        self._snapshot = snapshot
        arrays = snapshot.arrays
        self.tensors = {path: tensor_of(arrays[path]) for path in inputs_of(arrays)}
        tracked_paths = [
            path for path, array in arrays.items() if path in self.tensors.keys() & paths or size_of(array) > MAX_COMPARED_BYTES
        ]
        self._tracked = {id(arrays[path]): track(arrays[path], path, self.read) for path in tracked_paths}
        self._paths = frozenset(map(path_of, self._tracked.values()))
        self._tracked_entries: dict[tuple[str, Any], Any] = {}
        self._replaced_paths: set[str] = set()

    def enter(self) -> None:
        """Puts the tracked views into the places of the arrays."""
        if not self._tracked:
            return
        for path, container in self._snapshot.containers.items():
            for key, value in container.items.items():
                replacement = self._replaced(value)
                if replacement is not value:
                    container.put(key, replacement)
                    self._tracked_entries[path, key] = replacement
        self._snapshot.arguments.paths |= {id(tracked): path_of(tracked) for tracked in self._tracked.values()}

    def leave(self) -> None:
        """Forgets the tracked views. `Snapshot.restore` puts the arrays back into the containers."""
        for tracked in self._tracked.values():
            self._snapshot.arguments.paths.pop(id(tracked), None)

    def is_tracked_view(self, place: tuple[str, Any], value: Any) -> bool:
        """True if the value is the tracked view that `enter` put into this place."""
        return value is not None and self._tracked_entries.get(place) is value

    def check(self, written: Collection[str]) -> None:
        """Checks the reads of a recording.

        Args:
            written: the paths of arrays that the graph writes to.

        Raises:
            ValuesRead: Python has read arrays, or could have read arrays through a reference that `enter` did not replace.
            CaptureError: Python reads an array that the graph writes to.
        """
        aliased_ids = self._snapshot.aliased_ids
        not_replaced = {path_of(tracked) for array, tracked in self._tracked.items() if array in aliased_ids} | (
            self._paths - self._replaced_paths
        )
        if paths := frozenset((self.read | not_replaced) & self._paths):
            raise ValuesRead(paths)
        if unsafe := frozenset(written) - self._paths:
            hint = "copy the array, or read it only through tensors"
            raise CaptureError(f"the step writes to {min(unsafe)} through a tensor, and its Python code reads that array", hint=hint)

    def restore_values(self, include_unread: bool) -> list[str]:
        """Restores the values of arrays. Without `include_unread`, tracked arrays that this thread has not read keep their values.

        Returns: the paths of the arrays whose values had changed.
        """
        unread = frozenset() if include_unread else self._paths - self.read
        return self._snapshot.restore_values(unread)

    def _replaced(self, value: Any) -> Any:
        """Returns the tracked view for an array, a tuple with tracked views for a tuple with arrays, and any other value unchanged."""
        if (tracked := self._tracked.get(id(value))) is not None:
            self._replaced_paths.add(path_of(tracked))
            return tracked
        if not isinstance(value, tuple) or (type(value).__new__ is not tuple.__new__ and not hasattr(value, "_fields")):
            return value
        items = [self._replaced(item) for item in tuple.__iter__(value)]
        return tuple.__new__(type(value), items) if any(map(operator.is_not, items, tuple.__iter__(value))) else value


def path_of(array: TrackedArray) -> str:
    """Returns the path of a tracked array."""
    return str(np.ndarray.__getattribute__(array, "__dict__")["dynaxla_path"])


def is_same_data(first: torch.Tensor, second: torch.Tensor) -> bool:
    """True if two tensors are equal bit for bit."""
    with _disable_current_modes(), private.without_torch_function():
        return first.numpy(force=True).tobytes() == second.numpy(force=True).tobytes()
