"""The executables of a graph, by the sizes of its inputs. The thread that calls the graph compiles them, or a background thread does."""

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
from .build import Runnable, build, eager_executable, make_runnable
from .eager_executable import EagerExecutable, PendingExecutable
from .executable import Executable
from .stored import stored_executable
from .unit import CompilationUnit, SpecialisedGraph


@dataclass(frozen=True)
class CallTemplate:
    """A description of a call, from which the call's program can be compiled later, without the call's tensors.

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
        """Returns the template of a call now."""
        return CallTemplate([meta_like(arg) for arg in args], Settings.current(platform), torch.get_default_dtype())

    def specialised(self, unit: CompilationUnit) -> SpecialisedGraph:
        """Returns the graph with the sizes of the call, and the settings of that time."""
        with dtypes.defaulting_to(self.default_dtype):
            return unit.specialise(self.args, self.settings)


def meta_like(arg: Any) -> Any:
    """Returns a meta tensor with the sizes, strides and dtype of a tensor. An input that is not a tensor is returned unchanged."""
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta") if isinstance(arg, torch.Tensor) else arg


@dataclass
class _QueuedCompilation:
    """A program that waits to be compiled in the background.

    Attributes:
        graph: The graph to compile, or the template of a call from which the background thread makes that graph.
        pending: The runnable for calls until the program is compiled; None if the caller of `ready` runs these calls itself.
        requests: The number of calls so far that needed the program.
    """

    graph: SpecialisedGraph | CallTemplate
    pending: PendingExecutable | None = None
    requests: int = 0


# With the option compile="auto", a program is compiled in the background once this many calls have needed it. In a hundred calls with
# different lengths up to 512, only the four largest buckets are called more often.
_MIN_REQUESTS = 8


class ProgramCache:
    """The executables of a graph. Thread-safe.

    Attributes:
        foreground_left: The number of further programs for whose compilation calls wait. When it is 0, the background thread compiles, and
            torch's kernels run calls until then.
        fast_path: The executable's fast path (`EagerExecutable.fast_path`) if torch's kernels run every call of the graph, else None.
    """

    def __init__(self, unit: CompilationUnit) -> None:
        self._unit = unit
        self._capacity = unit.options.executables
        self._create_executables()
        self.fast_path: Callable[[list[Any]], list[Any] | None] | None = None
        self.foreground_left = unit.foreground_programs
        self._min_requests = _MIN_REQUESTS if unit.options.compile == "auto" else 1
        # By key, in the order of the programs' latest requests: the most recently requested program is last.
        self._queue: OrderedDict[Any, _QueuedCompilation] = OrderedDict()
        self._queue_lock = forks.lock()
        self._lock = forks.lock()
        forks.call_after_fork(self)

    def _create_executables(self) -> None:
        self._executables: LeastRecentlyUsed[Runnable] = LeastRecentlyUsed(self._capacity)
        # Returns the executable for a key; None if there is none. A bound method in an attribute, because each call of the graph needs it.
        self.get: Callable[[Any], Runnable | None] = self._executables.get

    @property
    def in_background(self) -> bool:
        """True if further programs are compiled by the background thread."""
        return self.foreground_left <= 0

    def put(self, key: Any, executable: Runnable) -> None:
        """Stores the executable for a key."""
        self._executables.put(key, executable)
        if not key and isinstance(executable, EagerExecutable):
            self.fast_path = executable.fast_path

    def compiled(self, key: Any, args: Sequence[Any], except_for: Runnable | None = None) -> Runnable:
        """Returns the executable for these inputs. If there is none, this thread compiles it.

        Args:
            key: The key of the inputs.
            args: The inputs.
            except_for: An executable that counts as missing, because it does not match the inputs.
        """
        with self._lock:
            executable = self._executables.get(key)
            if executable is None or executable is except_for:
                executable = make_runnable(self._unit, self._unit.specialise(args))
                self.put(key, executable)
                self.foreground_left -= 1
                if self.in_background and self._unit.options.compile == "auto":
                    dump.log.info(
                        "%s: further sizes are compiled in the background, and torch's kernels run them until then; compile='now' waits",
                        self._unit.name,
                    )
        return executable

    def pending(self, key: Any, args: Sequence[Any]) -> Runnable:
        """Returns a runnable for these inputs, without waiting for XLA to compile.

        It is the executable if there is one. Otherwise the program is queued for the background thread, and torch's kernels run the call.
        The queue does not refer to the inputs.
        """
        unit = self._unit
        with self._queue_lock:
            executable = self._executables.get(key)
            if executable is not None:
                return executable
            queued = self._queue.get(key)
            if queued is None or queued.pending is None:
                specialised = unit.specialise(args)
                if specialised.function is None:
                    executable = build(unit, specialised)
                else:
                    executable = eager_executable(unit, specialised) or stored_executable(unit, specialised)
                if executable is not None:
                    self.put(key, executable)
                    return executable
                runs_eagerly = PendingExecutable(unit.name, unit.eager_graph, specialised.buffers, unit.device)
                queued = _QueuedCompilation(specialised, runs_eagerly, 0 if queued is None else queued.requests)
                self._enqueue(key, queued)
            is_due = self._count_request(key)
            pending = queued.pending
            assert pending is not None
        if is_due:
            background.enqueue(self)
        return pending

    def ready(self, key: Any, args: Sequence[Any]) -> Runnable | None:
        """Returns the executable for inputs like these; None if there is none. Then the background thread is asked to compile it."""
        with self._queue_lock:
            executable = self._executables.get(key)
            if executable is not None:
                return executable
            if key not in self._queue:
                self._enqueue(key, _QueuedCompilation(CallTemplate.of(args, self._unit.platform)))
            is_due = self._count_request(key)
        if is_due:
            background.enqueue(self)
        return None

    def _count_request(self, key: Any) -> bool:
        """Counts a request of a queued program. Returns: True if it has been requested often enough to be compiled.

        The caller must hold `_queue_lock`.
        """
        self._queue.move_to_end(key)
        queued = self._queue[key]
        queued.requests += 1
        return queued.requests >= self._min_requests

    def _next(self) -> Any:
        """Returns the key of the program to compile next: the most recently requested one with enough requests. None if there is none."""
        return next((key for key, queued in reversed(self._queue.items()) if queued.requests >= self._min_requests), None)

    def _enqueue(self, key: Any, queued: _QueuedCompilation) -> None:
        """Queues a program, and drops the least recently requested one if the queue is longer than the cache's capacity."""
        self._queue[key] = queued
        if len(self._queue) > self._capacity:
            self._queue.popitem(last=False)

    def work(self) -> bool:
        """Compiles the next program of the queue. The background thread calls this. Returns: True if more programs are to be compiled.

        A failure is logged. From then on the calls of this graph compile their programs themselves, so that they raise the error.
        """
        with self._queue_lock:
            key = self._next()
            if key is None:
                return False
            graph = self._queue[key].graph
        try:
            executable = make_runnable(self._unit, graph if isinstance(graph, SpecialisedGraph) else graph.specialised(self._unit))
        except Exception as error:
            name = self._unit.name
            dump.log.error("%s could not be compiled in the background, and its next call compiles it again: %s", name, error)
            with self._queue_lock:
                self.foreground_left = math.inf
                self._queue.clear()
            return False
        with self._queue_lock:
            self.put(key, executable)
            self._queue.pop(key, None)
            return self._next() is not None

    def after_fork(self) -> None:
        """In a forked child: drops the parent's programs without calling or freeing them (XLA cannot run in the child)."""
        self.fast_path = None
        if len(self._executables):
            forks.leak(self._executables)
            self._create_executables()

    def executables(self) -> list[Executable]:
        """Returns the compiled programs, each once, least recently used first."""
        return list(dict.fromkeys(run for run in self._executables.values() if isinstance(run, Executable)))
