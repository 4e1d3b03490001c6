"""The executables of a graph, by the sizes of its inputs: compiled when a call needs them, or by another thread."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import forks
from ..lowering import Settings, dtypes
from ..observe import dump
from ..runtime import background
from ..runtime.cache import LeastRecentlyUsed
from .build import Runnable, is_for_torch, make_runnable
from .eager_executable import EagerExecutable, Pending
from .executable import Executable
from .stored import stored_executable
from .unit import CompilationUnit, Specialised


@dataclass(frozen=True)
class CallTemplate:
    """A description of a call, from which its program can be compiled later.

    Attributes:
        args: The inputs, with meta tensors in place of tensors.
        settings: torch's settings at the time of the call.
        default_dtype: torch's default dtype at the time of the call.
    """

    args: Sequence[Any]
    settings: Settings
    default_dtype: torch.dtype

    @staticmethod
    def of(args: Sequence[Any], platform: str) -> CallTemplate:
        return CallTemplate([meta_like(arg) for arg in args], Settings.current(platform), torch.get_default_dtype())

    def specialised(self, unit: CompilationUnit) -> Specialised:
        with dtypes.defaulting_to(self.default_dtype):
            return unit.specialise(self.args, self.settings)


def meta_like(arg: Any) -> Any:
    """Returns a meta tensor with the sizes, strides and dtype of a tensor; any other input as it is."""
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta") if isinstance(arg, torch.Tensor) else arg


@dataclass
class _QueuedCompilation:
    """A program that waits to be compiled in the background.

    Attributes:
        wanted: The graph to compile.
        pending: Runs calls until then; None if the caller of `ready` runs them itself.
        requests: The number of calls so far that needed the program.
    """

    wanted: Specialised | CallTemplate
    pending: Pending | None = None
    requests: int = 0


# With the option compile="auto", a program is compiled in the background after this many calls that needed it. In a hundred calls with
# different lengths up to 512, only the four largest buckets have more.
_WORTH = 8


class ProgramCache:
    """The executables of a graph. Thread-safe.

    Attributes:
        awaited: The number of programs that calls still wait for. Further ones are compiled by another thread, while torch's kernels run
            the calls.
        again: The fast path (`EagerExecutable.again`) if torch's kernels run every call of the graph.
    """

    def __init__(self, unit: CompilationUnit) -> None:
        self._unit = unit
        self._count = unit.options.executables
        self._begin()
        self.again: Callable[[list[Any]], list[Any] | None] | None = None
        self.awaited = unit.awaited
        self._worth = _WORTH if unit.options.compile == "auto" else 1
        self._waiting: OrderedDict[Any, _QueuedCompilation] = OrderedDict()  # the most recently requested program is last
        self._pending_lock = forks.lock()
        self._lock = forks.lock()
        forks.call_after_fork(self)

    def _begin(self) -> None:
        self._executables: LeastRecentlyUsed[Runnable] = LeastRecentlyUsed(self._count)
        # Returns the executable for a key; None if there is none.
        self.get: Callable[[Any], Runnable | None] = self._executables.get

    @property
    def in_background(self) -> bool:
        """True if another thread compiles, while torch's kernels run calls."""
        return self.awaited <= 0

    def keep(self, key: Any, executable: Runnable) -> None:
        self._executables.put(key, executable)
        if not key and isinstance(executable, EagerExecutable):
            self.again = executable.again

    def compiled(self, key: Any, args: Sequence[Any], other_than: Runnable | None = None) -> Runnable:
        """Returns the executable for these inputs, which this thread compiles if there is none, or if it is `other_than`."""
        with self._lock:
            executable = self._executables.get(key)
            if executable is None or executable is other_than:
                executable = make_runnable(self._unit, self._unit.specialise(args))
                self.keep(key, executable)
                self.awaited -= 1
                if self.in_background and self._unit.options.compile == "auto":
                    dump.log.info(
                        "%s: further sizes are compiled in the background, and torch's kernels run them until then; compile='now' waits",
                        self._unit.name,
                    )
        return executable

    def pending(self, key: Any, args: Sequence[Any]) -> Runnable:
        """Returns the runnable for this call while another thread compiles. Afterwards the inputs are no longer needed for compilation."""
        unit = self._unit
        with self._pending_lock:
            executable = self._executables.get(key)
            if executable is not None:
                return executable
            waiting = self._waiting.get(key)
            if waiting is None or waiting.pending is None:
                specialised = unit.specialise(args)
                if specialised.function is None or is_for_torch(unit, specialised):
                    executable = make_runnable(unit, specialised)
                else:
                    executable = stored_executable(unit, specialised)
                if executable is not None:
                    self.keep(key, executable)
                    return executable
                waiting = _QueuedCompilation(specialised, Pending(unit.name, unit.kernels, specialised.buffers, unit.device))
                self._wait(key, waiting)
            is_wanted = self._request(key)
            pending = waiting.pending
            assert pending is not None
        if is_wanted:
            background.want(self)
        return pending

    def ready(self, key: Any, args: Sequence[Any]) -> Runnable | None:
        """Returns the executable for inputs like these. If another thread still has to compile it, requests that and returns None."""
        with self._pending_lock:
            executable = self._executables.get(key)
            if executable is not None:
                return executable
            if key not in self._waiting:
                self._wait(key, _QueuedCompilation(CallTemplate.of(args, self._unit.platform)))
            is_wanted = self._request(key)
        if is_wanted:
            background.want(self)
        return None

    def _request(self, key: Any) -> bool:
        """Counts a request. Returns: whether to compile the program. The caller must hold the lock."""
        self._waiting.move_to_end(key)
        waiting = self._waiting[key]
        waiting.requests += 1
        return waiting.requests >= self._worth

    def _next(self) -> Any:
        """Returns the key of the most recently requested program that is to be compiled; None if there is none."""
        return next((key for key, waiting in reversed(self._waiting.items()) if waiting.requests >= self._worth), None)

    def _wait(self, key: Any, waiting: _QueuedCompilation) -> None:
        self._waiting[key] = waiting
        if len(self._waiting) > self._count:
            self._waiting.popitem(last=False)

    def work(self) -> bool:
        """Compiles the most recently requested program of those that wait. Returns: whether others are waiting.

        A failure is logged. From then on calls of this graph compile in the foreground, so that they raise the error.
        """
        with self._pending_lock:
            key = self._next()
            if key is None:
                return False
            wanted = self._waiting[key].wanted
        try:
            executable = make_runnable(self._unit, wanted if isinstance(wanted, Specialised) else wanted.specialised(self._unit))
        except Exception as error:
            name = self._unit.name
            dump.log.error("%s could not be compiled in the background, and its next call compiles it again: %s", name, error)
            with self._pending_lock:
                self.awaited = math.inf
                self._waiting.clear()
            return False
        with self._pending_lock:
            self.keep(key, executable)
            self._waiting.pop(key, None)
            return self._next() is not None

    def after_fork(self) -> None:
        """In a forked child: drops the parent's programs without calling or freeing them."""
        self.again = None
        if len(self._executables):
            forks.leak(self._executables)
            self._begin()

    def executables(self) -> list[Executable]:
        return list(dict.fromkeys(run for run in self._executables.values() if isinstance(run, Executable)))
