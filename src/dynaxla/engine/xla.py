"""The XLA engine: it lowers and compiles a graph once for each combination of input sizes, and afterwards only runs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import torch
from torch.utils._python_dispatch import _disable_current_modes

from .. import forks, user_frames
from ..buffers.device_kinds import BufferRequest, DeviceKind, LayoutMismatch
from ..buffers.native import GraphDevice
from ..capture.graph import AtenGraph
from ..config import Options
from ..errors import DynaxlaError
from ..lowering import Settings
from ..lowering.function import Function
from ..observe import metrics
from ..runtime import eager_fallback, meshes, private, process_networks, streams
from ..runtime.cache import LeastRecentlyUsed
from . import dry_run
from .build import Runnable, build
from .executable import Executable, random_numbers_under_jit
from .program_cache import ProgramCache, meta_like
from .unit import CompilationUnit, GetStore

# A call raises after it has found other input layouts than its executable expects for this many times. Another thread may change the
# layouts during the call.
_MAX_LAYOUT_CHANGES = 16


class Xla:
    """An engine whose runners keep a compiled program for each combination of input sizes.

    Args:
        options: The options of the compilation.
        blocks: True if equal blocks of an inference graph share one program (see blocks.py).
    """

    def __init__(self, options: Options, *, blocks: bool = True) -> None:
        self.options, self.blocks = options, blocks
        self.store: GetStore = options.store

    def runner(self, graph: AtenGraph) -> CompiledGraph:
        return CompiledGraph(CompilationUnit(graph, self.options, blocks=self.blocks, store=self.store))


class CompiledGraph:
    """The runner of a graph (see `protocol.Runner`), with its executables by input sizes.

    Attributes:
        unit: The graph.
        cache: Its executables.
    """

    def __init__(self, unit: CompilationUnit) -> None:
        # An attribute of the instance, not the class: AOTAutograd wraps the backward graph with functools.wraps, which copies only instance
        # attributes.
        self._boxed_call = True
        self.name, self.unit, self.cache = unit.name, unit, ProgramCache(unit)
        self._plan_executables: LeastRecentlyUsed[Executable] = LeastRecentlyUsed(unit.options.executables)
        self._lock = forks.lock()
        # The key of a backward graph has the strides of its inputs if torch's kernels may run the forward graph: the values that they save
        # may have other strides than the values that a program saves.
        self._key_has_strides = unit.foreground_programs < math.inf and unit.phase == "backward"
        # True if the key of every call is ().
        self._has_one_key = unit.sizes.is_static and not unit.groups and not Settings.vary_on(unit.platform) and not self._key_has_strides
        if not forks.has_lost_xla():
            _ = unit.jax_device  # raises here, not in the first call, if there is no such device
        metrics.add("graphs")

    def __call__(self, args: list[Any]) -> list[Any]:
        cache = self.cache
        if private.mode_count() or dry_run.threads or self.unit.device_kind is not None:
            if (outputs := self._outputs_without_run(args)) is not None:
                return outputs
        elif cache.fast_path is not None and (outputs := cache.fast_path(args)) is not None:
            return outputs
        key = () if self._has_one_key else self._key(args)
        executable = cache.get(key)
        if executable is None:
            if eager_fallback.is_needed(args):
                return self.unit.run_by_torch(args)
            try:
                executable = cache.pending(key, args) if cache.in_background else cache.compiled(key, args)
            except KeyboardInterrupt as interrupt:
                raise user_frames.with_user_frames_only(interrupt) from None
        for _ in range(_MAX_LAYOUT_CHANGES):
            try:
                taken = executable.take(args)
            except LayoutMismatch:  # also possible right after the executable was built: another thread may write to an input's storage
                executable = self._with_layouts_of(args, key, executable)
            else:
                return executable(taken)
        raise DynaxlaError(
            f"the memory layout of the inputs of {self.name} changed {_MAX_LAYOUT_CHANGES} times during one call",
            hint="do not write to the inputs in other threads during the call",
        )

    def _outputs_without_run(self, args: list[Any]) -> list[Any] | None:
        """Returns the outputs of a call that must not run the graph's program, because the call is traced or planned. None for other calls.

        Raises: DryRun for a call in a dry run.
        """
        if eager_fallback.is_being_traced():
            return self.unit.run_by_torch(args)
        if dry_run.threads:
            dry_run.stop_if_dry_run(self, args)
        kind = self.unit.device_kind
        if kind is not None and kind.are_tracers(args):
            return self._inlined(kind, args)
        return self._planned(kind, args) if kind is not None and meshes.is_compile_only() else None

    def ready(self, args: Sequence[Any]) -> Runnable | None:
        """Returns the executable for inputs like these. If it is still to be compiled in the background, requests that and returns None.

        Args:
            args: The inputs of a call. The tensors' values are not read.
        """
        key = self._key(args)
        executable = self.cache.get(key)
        if executable is None:
            return self.cache.ready(key, args) if self.cache.in_background else self.cache.compiled(key, args)
        return executable

    def prepare(self) -> None:
        """Compiles the program for the graph's example inputs, if the graph fixes their sizes and strides.

        It does nothing for graphs with dynamic sizes, backward graphs, and graphs with XLA's own collectives. Raises: as a call does.
        """
        unit = self.unit
        if not unit.sizes.is_static or unit.phase == "backward" or unit.groups or forks.has_lost_xla():
            return
        with _disable_current_modes():  # without the dispatch modes of the capture that calls this method
            args = [meta_like(node.meta["val"]) for node in unit.interpreter.placeholders]
            self.cache.compiled(self._key(args), args)

    def executables(self) -> list[Executable]:
        return self.cache.executables()

    def _key(self, args: Sequence[Any]) -> Any:
        """Returns a hashable key that is equal for inputs that can share an executable."""
        unit = self.unit
        key: Any = () if unit.sizes.is_static else unit.sizes.key(args)
        if unit.groups:
            key = (*key, process_networks.group_numbers(unit.groups))
        if unit.platform == "cuda":
            streams.check_not_captured()
        if Settings.vary_on(unit.platform):
            key = (*key, Settings.current(unit.platform))
        if self._key_has_strides:
            key = (*key, *[arg.stride() if isinstance(arg, torch.Tensor) else None for arg in args])
        return key

    def _with_layouts_of(self, args: Sequence[Any], key: Any, mismatched: Runnable) -> Runnable:
        """Returns the executable for inputs with these layouts in their storages. Later calls with this key try it first.

        Args:
            args: The inputs.
            key: The key of these inputs (see `_key`).
            mismatched: The executable that has raised `LayoutMismatch` for these inputs.
        """
        assert self.unit.device_kind is not None
        layout_key = key, self.unit.device_kind.layout_signature(args)
        executable = self.cache.get(layout_key)
        if executable is None or executable is mismatched:  # another thread wrote to an input's storage while this executable was built
            executable = self.cache.compiled(layout_key, args, except_for=mismatched)
        self.cache.put(key, executable)
        return executable

    def _planned(self, kind: DeviceKind, args: list[Any]) -> list[Any]:
        """Compiles the program of a call for inspection, without running it. Returns: output tensors without values."""
        topology = meshes.topology()
        key = self._key(args), kind.planned_shardings(args), topology
        with self._lock:
            executable = self._plan_executables.get(key)
            if executable is None:
                unit = self.unit if topology is None else self.unit.for_topology(topology)
                executable = build(unit, unit.specialise(args, planned=True))
                self._plan_executables.put(key, executable)
        executable.record_run()
        return kind.outputs_without_values(
            executable.binding, args, executable.program.result_shardings() if executable.program is not None else ()
        )

    def _inlined(self, kind: DeviceKind, args: list[Any]) -> list[Any]:
        """Runs a call inside a function that JAX traces, so that the graph becomes part of that trace.

        Checks of values are dropped, because values are not known during the trace.

        Raises: UnsupportedOp for random numbers; UnsupportedTensor for a tracer whose trace has ended.
        """
        unit = self.unit
        interpreter, symbols, settings = unit.interpreter, unit.sizes.values(args), Settings.current(unit.platform)
        if interpreter.draws_random:
            raise random_numbers_under_jit(self.name)
        device, numbers = GraphDevice(unit.device, unit.jax_device), {index: args[index] for index in unit.sizes.numbers}
        buffers = kind.buffers(
            BufferRequest(interpreter, symbols, args, unit.phase, device, unit.storages, unit.rederived_outputs, donate=False)
        )
        function = Function(interpreter, symbols, numbers, buffers.nodes, buffers.numbers, settings=settings)
        binding = buffers.bind(unit.numbers(buffers, symbols, numbers))
        tensors = binding.take(args)
        arrays = binding.arrays(tensors)
        try:
            with jax.enable_x64(True):
                inputs, key = buffers.unpack(arrays)
                results = buffers.pack(function(inputs, key).outputs)
        except jax.errors.UnexpectedTracerError as error:
            binding.abandon(False, tensors)
            raise kind.escaped_tracer_error(error) from error
        except BaseException:
            binding.abandon(False, tensors)
            raise
        return binding.outputs(binding.export(results, tensors), tensors)
