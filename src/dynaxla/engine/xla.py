"""The XLA engine: it lowers and compiles a graph once for each combination of input sizes, and afterwards only runs it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import forks
from ..buffers.device_kinds import DeviceKind, LayoutMismatch, Request
from ..buffers.native import GraphDevice
from ..capture.graph import AtenGraph
from ..config import Options
from ..errors import DynaxlaError
from ..lowering import Settings, dtypes
from ..lowering.function import Function
from ..lowering.interchange import is_interchangeable
from ..observe import dump, metrics
from ..runtime import background, by_torch, meshes, networks, private, streams
from ..runtime.cache import LeastRecentlyUsed
from . import held_back
from .executable import Executable, drawing_under_trace
from .making import ExecutableBuilder, Runnable
from .pending import EagerExecutable, Pending
from .stages import Specialised, Stores

# Attempts to find a program for the layouts of one call's inputs, which another thread may change meanwhile.
_TRIES = 16


class Xla:
    """An engine whose runners keep a compiled program for each combination of input sizes.

    Args:
        options: The options of the compilation.
        blocks: Whether equal blocks of an inference graph share one program (see blocks.py).
    """

    def __init__(self, options: Options, *, blocks: bool = True) -> None:
        self.options, self.blocks = options, blocks
        self.store: Stores = options.store

    def runner(self, graph: AtenGraph) -> Program:
        return Program(graph, self.options, blocks=self.blocks, store=self.store)


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


def _like(arg: Any) -> Any:
    return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta") if isinstance(arg, torch.Tensor) else arg


@dataclass(frozen=True)
class _QueuedCompilation:
    """A program that waits to be compiled in the background.

    Attributes:
        wanted: The graph to compile.
        pending: Runs calls until then; None if the caller of `ready` runs them itself.
    """

    wanted: Specialised | CallTemplate
    pending: Pending | None = None


class Program(ExecutableBuilder):
    """The runner of a graph (see `protocol.Runner`), with its executables by input sizes.

    Raises: UnsupportedOp, UnsupportedTensor, DeviceMismatch.
    """

    def __init__(self, graph: AtenGraph, options: Options, *, blocks: bool = False, store: Stores | None = None) -> None:
        super().__init__(graph, options, blocks=blocks, store=store)
        # On the instance, not the class: AOTAutograd wraps the backward with functools.wraps, which copies the instance's attributes only.
        self._boxed_call = True
        self._executables: LeastRecentlyUsed[Runnable] = LeastRecentlyUsed(options.executables)
        self._planned_for: LeastRecentlyUsed[Executable] = LeastRecentlyUsed(options.executables)
        # The fast path (`EagerExecutable.again`) if torch's kernels run every call of the graph.
        self._again: Callable[[list[Any]], list[Any] | None] | None = None
        # Whether torch's kernels run calls while XLA compiles.
        self.in_background = options.compile == "background" and is_interchangeable(graph.module)
        # Values that torch's kernels save for a backward pass may have other strides than those that a program saves.
        self._tells_strides = self.in_background and graph.phase == "backward"
        self._waiting: OrderedDict[Any, _QueuedCompilation] = OrderedDict()  # the most recently requested program is last
        self._pending_lock = forks.lock()
        forks.renew(self)
        if not forks.is_cut_off():
            _ = self.jax_device  # raises now if there is none
        self._lock = forks.lock()
        metrics.add("graphs")

    def __call__(self, args: list[Any]) -> list[Any]:
        again = self._again
        if again is not None and not private.mode_count() and not held_back.threads and (outputs := again(args)) is not None:
            return outputs
        if by_torch.is_looked_at():
            return self.run_by_torch(args)
        if held_back.threads:
            held_back.hold_back(self, args)
        if self._kind is not None:
            if self._kind.are_traced(args):
                return self._inlined(self._kind, args)
            if meshes.is_planning():
                return self._planned(self._kind, args)
        key = self._key(args)
        executable: Runnable | None = self._executables.get(key)
        if executable is None:
            if by_torch.is_needed(args):
                return self.run_by_torch(args)
            executable = self._pending_for(key, args) if self.in_background else self._built_for(key, args)
        for _ in range(_TRIES):
            try:
                taken = executable.take(args)
            except (
                LayoutMismatch
            ):  # even from the executable made for these inputs, if another thread has meanwhile written to an input's storage
                executable = self._alike(key, args, executable)
            else:
                return executable(taken)
        raise DynaxlaError(
            f"the memory layout of the inputs of {self.name} changed {_TRIES} times during one call",
            hint="do not write to the inputs in other threads during the call",
        )

    def _planned(self, kind: DeviceKind, args: list[Any]) -> list[Any]:
        """Compiles the program of a call for inspection, without running it. Returns: outputs without values."""
        key = "planned", self._key(args), kind.plans(args)
        with self._lock:
            executable = self._planned_for.get(key)
            if executable is None:
                executable = self.build(self.specialise(args, planned=True))
                self._planned_for.put(key, executable)
        executable.show()
        return kind.blank(executable.binding, args, executable.program.lie() if executable.program is not None else ())

    def _inlined(self, kind: DeviceKind, args: list[Any]) -> list[Any]:
        """Runs a call inside a function that JAX traces, so that the graph becomes part of that trace. Checks of values are dropped,
        because the values are not known during the trace.

        Raises: UnsupportedOp for random numbers; UnsupportedTensor for a tracer whose trace has ended.
        """
        interpreter, symbols, settings = self.interpreter, self.sizes.values(args), Settings.current(self.platform)
        if interpreter.draws_random:
            raise drawing_under_trace(self.name)
        place, given = GraphDevice(self.device, self.jax_device), {index: args[index] for index in self.sizes.numbers}
        buffers = kind.buffers(Request(interpreter, symbols, args, self.phase, place, self._storages, self._remade, donate=False))
        function = Function(interpreter, symbols, given, buffers.nodes, buffers.numbers, settings=settings)
        binding = buffers.bind(self.numbers(buffers, symbols, given))
        tensors = binding.take(args)
        arrays = binding.arrays(tensors)
        try:
            with jax.enable_x64(True):
                inputs, key = buffers.unpack(arrays)
                results = buffers.pack(function(inputs, key).outputs)
        except jax.errors.UnexpectedTracerError as error:
            binding.abandon(False, tensors)
            raise kind.outlived(error) from error
        except BaseException:
            binding.abandon(False, tensors)
            raise
        return binding.outputs(binding.export(results, tensors), tensors)

    def _alike(self, key: Any, args: Sequence[Any], unlike: Runnable) -> Runnable:
        """Returns the executable for inputs with these layouts in their storages. Later calls try it first.

        unlike: The executable that has raised `LayoutMismatch` for these inputs.
        """
        assert self._kind is not None
        own = key, self._kind.signature(args)
        executable = self._executables.get(own)
        if executable is unlike:  # another thread wrote to an input's storage while this executable was built
            with self._lock:
                executable = self.made(self.specialise(args))
                self._keep(own, executable)
        elif executable is None:
            executable = self._built_for(own, args)
        self._executables.put(key, executable)
        return executable

    def ready(self, args: Sequence[Any]) -> Runnable | None:
        """Returns the executable for inputs like these. If it is still to be compiled in the background, requests that and returns None.

        args: The inputs of a call. The tensors' values are not read.
        """
        key = self._key(args)
        executable = self._executables.get(key)
        if executable is None and not self.in_background:
            return self._built_for(key, args)
        if executable is None:
            with self._pending_lock:
                executable = self._executables.get(key)
                if executable is not None:
                    return executable
                if key not in self._waiting:
                    likeness = CallTemplate([_like(arg) for arg in args], Settings.current(self.platform), torch.get_default_dtype())
                    self._wait(key, _QueuedCompilation(likeness))
                self._waiting.move_to_end(key)
            background.want(self)
        return executable

    def prepare(self) -> None:
        """Compiles for the graph's example inputs, if the graph fixes their sizes and strides. It does nothing for dynamic sizes, for
        backward graphs, and for XLA's own collectives. Raises: as a call does."""
        if not self.sizes.is_static or self.phase == "backward" or self.groups or forks.is_cut_off():
            return
        with _disable_current_modes():  # the modes of the surrounding capture
            args = [_like(node.meta["val"]) for node in self.interpreter.placeholders]
            self._built_for(self._key(args), args)

    def _key(self, args: Sequence[Any]) -> Any:
        """Returns a hashable key that is equal for inputs that can share an executable."""
        key: Any = () if self.sizes.is_static else self.sizes.key(args)
        if self.groups:
            key = (*key, networks.token(self.groups))
        if self.platform == "cuda":
            streams.check_not_captured()
            key = (*key, Settings.current(self.platform))
        if self._tells_strides:
            key = (*key, *[arg.stride() if isinstance(arg, torch.Tensor) else None for arg in args])
        return key

    def _built_for(self, key: Any, args: Sequence[Any]) -> Runnable:
        with self._lock:
            executable = self._executables.get(key)
            if executable is None:
                executable = self.made(self.specialise(args))
                self._keep(key, executable)
        return executable

    def _keep(self, key: Any, executable: Runnable) -> None:
        self._executables.put(key, executable)
        if not key and isinstance(executable, EagerExecutable):
            self._again = executable.again

    def _pending_for(self, key: Any, args: Sequence[Any]) -> Runnable:
        """Returns the runnable for this call while another thread compiles. Afterwards the inputs are no longer needed for compilation."""
        with self._pending_lock:
            executable = self._executables.get(key)
            if executable is not None:
                return executable
            waiting = self._waiting.get(key)
            if waiting is None or waiting.pending is None:
                specialised = self.specialise(args)
                if specialised.function is None or self._is_for_torch(specialised):
                    executable = self.made(specialised)
                else:
                    executable = self._compiled_before(specialised)
                if executable is not None:
                    self._keep(key, executable)
                    return executable
                waiting = _QueuedCompilation(specialised, Pending(self.name, self._kernels, specialised.buffers, self.device))
                self._wait(key, waiting)
            self._waiting.move_to_end(key)
            pending = waiting.pending
            assert pending is not None
        background.want(self)
        return pending

    def _wait(self, key: Any, waiting: _QueuedCompilation) -> None:
        self._waiting[key] = waiting
        if len(self._waiting) > self.options.executables:
            self._waiting.popitem(last=False)

    def work(self) -> bool:
        """Compiles the most recently requested program of those that wait. Returns: whether others are waiting.

        A failure is logged. From then on calls of this graph compile in the foreground, so that they raise the error.
        """
        with self._pending_lock:
            if not self._waiting:
                return False
            key = next(reversed(self._waiting))
            wanted = self._waiting[key].wanted
        try:
            executable = self.made(wanted if isinstance(wanted, Specialised) else self._specialised(wanted))
        except Exception as error:
            dump.log.error("%s could not be compiled in the background, and its next call compiles it again: %s", self.name, error)
            with self._pending_lock:
                self.in_background = False
                self._waiting.clear()
            return False
        with self._pending_lock:
            self._keep(key, executable)
            self._waiting.pop(key, None)
            return bool(self._waiting)

    def _specialised(self, likeness: CallTemplate) -> Specialised:
        with dtypes.defaulting_to(likeness.default_dtype):
            return self.specialise(likeness.args, likeness.settings)

    def run_by_torch(self, args: list[Any]) -> list[Any]:
        """Runs the graph without XLA. Raises: ForkError if options.fallback is "error" and this process cannot use XLA."""
        if self.options.fallback == "error" and forks.is_cut_off():
            raise forks.cut_off()
        return by_torch.run(self.interpreter.module, args)

    def after_fork(self) -> None:
        """In a forked child: drops the parent's programs without calling or freeing them."""
        self._again = None
        if len(self._executables):
            forks.leave(self._executables)
            self._executables = LeastRecentlyUsed(self.options.executables)

    def executables(self) -> list[Executable]:
        return list(dict.fromkeys(run for run in self._executables.values() if isinstance(run, Executable)))
