"""The programs of a call on "cuda", compiled by the backend for a GPU that does not exist. Import this module before torch."""

from __future__ import annotations

from .fakes import MODE  # isort: skip  (before torch)

import contextlib
import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

import jax
import torch
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from commands.compiled_programs import hlo
from dynaxla.buffers.native import NativeBuffers
from dynaxla.capture.graph import AtenGraph
from dynaxla.config import Options
from dynaxla.engine import scheduler
from dynaxla.engine.compile import trace
from dynaxla.engine.options import compile_with_cublas_fallback, options_for
from dynaxla.engine.unit import CompilationUnit, SpecialisedGraph
from dynaxla.engine.xla import CompiledGraph
from dynaxla.lowering import Settings
from dynaxla.passes.jaxpr.open_layouts import check_closed
from dynaxla.runtime import clients
from dynaxla.runtime.layout import Layout

from .errors import GpuProgramsError
from .runner import UNCHECKED
from .target import H100


@functools.cache
def gpu() -> jax.Device:
    """Returns the GPU that XLA compiles for. Raises: GpuProgramsError without the plugin."""
    if not os.environ.get(UNCHECKED):
        raise GpuProgramsError(f"set {UNCHECKED}=1 in the environment of this process: without a driver JAX refuses its CUDA plugin")
    try:
        return topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H100).devices[0]
    except (RuntimeError, NotImplementedError) as error:
        raise GpuProgramsError(f"JAX has no CUDA plugin here (`make gpu-programs` installs one): {error}") from error


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program.

    Attributes:
        name: The graph's name.
        phase: "inference", "forward" or "backward"; "prepared" for a program that computes values of frozen parameters once.
        graph: The ATen graph.
        stablehlo: The lowered program.
        text: The optimized program.
        temporary_bytes: The memory that the program needs in addition to inputs and outputs.
    """

    name: str
    phase: str
    graph: GraphModule
    stablehlo: str
    text: str
    temporary_bytes: int

    @property
    def instructions(self) -> list[hlo.Instruction]:
        """The instructions of the entry computation."""
        return hlo.Module.parse(self.text).entry


def programs(
    function: Any, *args: Any, backward: bool = False, options: Mapping[str, Any] | None = None, **compile_args: Any
) -> list[Compiled]:
    """Returns the programs of one call with fake tensors, and of its gradient, in order. options: those of torch.compile."""
    torch._dynamo.reset()
    compiled: list[Compiled] = []
    all_options = {"cache": "", **(options or {})}
    # Under FakeTensorMode, AOTAutograd does not run programs, but torch's ops.
    with mock.patch.object(scheduler, "Xla", functools.partial(_Engine, compiled)), MODE:
        with contextlib.nullcontext() if backward else torch.no_grad():
            out = torch.compile(function, backend="dynaxla", fullgraph=True, dynamic=False, options=all_options, **compile_args)(*args)
        if backward:
            outputs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
            torch.autograd.backward(outputs, [torch.empty_like(leaf) for leaf in outputs])
    return compiled


class _Engine:
    """An engine that compiles each graph at once as a whole: it ignores `blocks`, a parameter of Xla. Its runners run torch's ops."""

    def __init__(self, compiled_programs: list[Compiled], options: Options, *, blocks: bool) -> None:
        self._compiled_programs, self._options = compiled_programs, options
        self._saved: dict[str, tuple[int, ...]] = {}

    def runner(self, graph: AtenGraph) -> CompiledGraph:
        unit = _Unit(graph, self._options)
        compiled = _compiled(unit, self._saved)
        if compiled is not None:
            self._compiled_programs.append(compiled)
        return CompiledGraph(unit)


class _Unit(CompilationUnit):
    @property
    def jax_device(self) -> jax.Device:  # type: ignore[override]
        """The device of constants that are created while the program is traced."""
        return clients.cpu_device()

    def specialise(self, args: Sequence[Any]) -> SpecialisedGraph:  # type: ignore[override]
        specialised = super().specialise(args)
        assert isinstance(specialised.buffers, NativeBuffers)
        return dataclasses.replace(specialised, buffers=_OnGpu(specialised.buffers))


def _compiled(unit: _Unit, saved: dict[str, tuple[int, ...]]) -> Compiled | None:
    """Compiles a graph. Returns None if the graph computes nothing.

    Args:
        unit: The graph's unit.
        saved: By name, the orders of dimensions in memory of the values that the forward program saves for the backward program. XLA
            chooses these orders. A forward program adds its own.
    """
    specialised = unit.specialise([_in_order(node, saved) for node in unit.interpreter.placeholders])
    if specialised.function is None:
        return None
    traced, buffers, _ = trace(unit, specialised.function, specialised.buffers)
    with jax.enable_x64(True):
        lowered = traced.lower(lowering_platforms=("cuda",))
    options = {**options_for(unit.platform, traced.jaxpr, Settings.current(unit.platform)), **unit.options.xla}
    compiled = compile_with_cublas_fallback(
        lambda compiler_options: lowered.compile(compiler_options=dict(compiler_options) or None), options
    )
    formats = jax.tree.leaves(compiled.output_formats)
    check_closed({index: tuple(format_.layout.major_to_minor) for index, format_ in enumerate(formats)}, buffers.free_results)
    saved.update({buffers.nodes[index].name: tuple(formats[index].layout.major_to_minor) for index in buffers.free_results})
    phase = "prepared" if unit.name.endswith("_prepared") else unit.phase
    temporary = compiled.memory_analysis().temp_size_in_bytes
    return Compiled(unit.name, phase, unit.interpreter.module, lowered.as_text(), compiled.as_text() or "", temporary)


def _in_order(node: Node, saved: Mapping[str, tuple[int, ...]]) -> Any:
    """Returns the value of a placeholder, in the layout that the forward program has chosen."""
    value = node.meta["val"]
    if node.name not in saved:
        return value
    return value.new_empty_strided(value.shape, Layout.ordered(tuple(value.shape), saved[node.name]).strides)


class _OnGpu:
    """Buffers with arrays on the GPU that does not exist."""

    def __init__(self, buffers: Any) -> None:
        self._buffers = buffers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffers, name)

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        sharding = SingleDeviceSharding(gpu())
        return [jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding) for aval in self._buffers.avals()]

    def with_result_orders(self, orders: Any) -> _OnGpu:
        return _OnGpu(self._buffers.with_result_orders(orders))
