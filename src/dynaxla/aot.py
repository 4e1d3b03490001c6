"""Captures a TorchDynamo graph with AOTAutograd, and compiles the resulting ATen graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.fx import GraphModule

from .autoselect.competing_engines import GraphFacts
from .buffers.lost_writes import LostWrite, LostWrites, without_lost_write_checks
from .buffers.overlaps import AliasGuard, internally_overlapping
from .capture.decompositions import decompositions
from .capture.graph import AtenGraph, Phase, written_inputs
from .capture.graph_cache import CachedGraph, key_of
from .capture.inputs import Sizes
from .capture.runtime_wrapper import leading_writes, rederived_outputs, with_leading_writes
from .config import Options
from .engine.protocol import Runner
from .errors import OptionError
from .observe import events, metrics, rewrites
from .passes import pipeline
from .passes.joint.partition import LateOutput, partition
from .runtime import capture_lock
from .runtime.store import Store

# The reason to run a graph with torch's kernels if its inputs overlap, as a clause about the graph.
OVERLAP = "it writes to an input that shares memory with another input or overlaps itself, and AOTAutograd did not detect that"


@dataclass
class AotCapture:
    """The capture of one graph by AOTAutograd.

    Attributes:
        module: TorchDynamo's graph.
        example_inputs: the graph's inputs.
        options: the options of the compilation.
        number: the graph's number.
        platform: the platform of the programs.
        build: returns the runner of an ATen graph.
        facts: receives the facts about the graph.
        undetected_overlaps: the positions of inputs that share memory in a way that AOTAutograd does not detect.
        cache: the store in which later processes find the graph, and the graph's key there; None if the graph is not cached.
        is_pickled: True if torch pickles the compiled function. Then AOTAutograd's runtime wrapper is not replaced (runtime_wrapper.py).
    """

    module: GraphModule
    example_inputs: Sequence[Any]
    options: Options
    number: int
    platform: str
    build: Callable[[AtenGraph], Any]
    facts: GraphFacts
    undetected_overlaps: Collection[int] = ()
    cache: tuple[Store, str] | None = None
    is_pickled: bool = False
    # The compiled function without AOTAutograd's wrapper, if the wrapper is not needed (runtime_wrapper.py).
    _unwrapped: Callable[..., Any] | None = field(default=None, init=False)

    def run(self) -> Callable[..., Any]:
        """Returns the compiled function. The caller must check `facts.overlaps` at each call.

        Raises: LostWrite for a graph that must run with torch's kernels; the errors of AOTAutograd and of `build`.
        """
        name, nodes = f"dynaxla_{self.number}", len(self.module.graph.nodes)
        try:
            with capture_lock.capturing(), metrics.timed("capture", name, nodes), rewrites.dumping_to(self.options.dump_directory, name):
                compiled = self._run_aot_autograd()
        finally:
            # AOTAutograd keeps the backward compiler, and with it this object, as long as the compiled function lives.
            self.example_inputs = ()
        # `aot_autograd` wraps the function so that TorchDynamo does not trace it. The wrapper takes time at every call and is not needed,
        # because TorchDynamo never traces the function of a backend.
        if self._unwrapped is not None:
            return self._unwrapped
        return getattr(compiled, "_torchdynamo_orig_callable", compiled)

    def _run_aot_autograd(self) -> Callable[..., Any]:
        with LostWrites(), contextlib.nullcontext() if self.is_pickled else pipeline.COMPOSITES(self.module):
            return aot_autograd(
                fw_compiler=self._compiler("forward"),
                bw_compiler=self._compiler("backward"),
                inference_compiler=self._compiler("inference"),
                partition_fn=self._partition,
                decompositions=decompositions(self.platform),
            )(self.module, self.example_inputs)

    def _partition(self, joint: GraphModule, inputs: Any, **settings: Any) -> tuple[GraphModule, GraphModule]:
        self.facts.check_aten(joint)
        try:
            return partition(joint, inputs, platform=self.platform, exact_rng=self.options.exact_rng, **settings)
        except LateOutput:
            raise LostWrite(
                "its forward pass returns a view of an input, and its backward pass writes to that input",
                hint="return a clone of the view from the forward pass",
            ) from None

    def _compiler(self, phase: Phase) -> Callable[[GraphModule, Sequence[Any]], Runner]:
        @without_lost_write_checks()
        def compile_graph(graph: GraphModule, _: Sequence[Any]) -> Runner:
            return self._compile_inference(graph) if phase == "inference" else self._compile_training(graph, phase)

        return compile_graph

    def _compile_training(self, module: GraphModule, phase: Phase) -> Runner:
        if self.options.freeze:
            hint = "call the model under torch.no_grad(), or call model.requires_grad_(False) before"
            raise OptionError("option freeze is for inference, and this call needs gradients", hint=hint)
        metadata = _metadata()
        static = tuple(metadata.static_input_indices) if phase == "forward" and metadata is not None else ()
        runner = self.build(self._report_graph(AtenGraph(self._name(phase), module, static, phase)))
        if phase == "forward":  # the backward graph is compiled after example_inputs are released
            self._find_overlaps(metadata, module)
        return runner

    def _compile_inference(self, module: GraphModule) -> Runner:
        self.facts.check_aten(module)
        metadata = _metadata()
        static = tuple(metadata.static_input_indices) if metadata is not None else ()
        graph = self._report_graph(
            AtenGraph(self._name("inference"), module, static, rederived_outputs=rederived_outputs(metadata, module))
        )
        written = None
        if metadata is not None and not self.is_pickled:
            written = leading_writes(metadata, module, self.module, self.example_inputs)
        # The cache entry is created before `build`, which may change the graph.
        cached = CachedGraph.of(graph, written) if self.cache is not None and written is not None else None
        runner = self.build(graph)
        self._find_overlaps(metadata, module)
        if self.cache is not None and cached is not None:
            store, key = self.cache
            store.put(key, cached.text())
        if written is not None:
            self._unwrapped = with_leading_writes(runner, written)
        return runner

    def _name(self, phase: Phase) -> str:
        return f"dynaxla_{self.number}_{phase}"

    def _report_graph(self, graph: AtenGraph) -> AtenGraph:
        """Reports a graph to listeners, and returns it."""
        if events.has_listeners():
            events.emit(events.GraphFunctionalized.of(self.number, graph))
        return graph

    def _find_overlaps(self, metadata: Any, module: GraphModule) -> None:
        """Stores in `facts` the inputs that the graph writes to, and a guard on the inputs that may overlap in later calls.

        Raises: LostWrite if, in this call, a written input overlaps itself, or overlaps another input and AOTAutograd does not detect that.
        """
        if metadata is None:  # a recorded step, whose guards compare the memory of its inputs at each call
            self._check_writes(set(written_inputs(module.graph).values()))
            return
        written, parameters = _written_inputs(metadata, self.example_inputs)
        self.facts.written_inputs = written
        self._check_writes(written)
        overlaps = AliasGuard(self.example_inputs, written, parameters, Sizes(module.graph.find_nodes(op="placeholder")).is_static)
        if overlaps.is_needed and not self.is_pickled:  # a pickled runner checks its inputs itself
            self.facts.overlaps = overlaps

    def _check_writes(self, written: Set[int]) -> None:
        """Raises LostWrite if one of the inputs at these positions shares memory, and AOTAutograd has not detected that."""
        if written and written & {*self.undetected_overlaps, *internally_overlapping(self.example_inputs)}:
            raise LostWrite(OVERLAP)


def cache_location(module: GraphModule, example_inputs: Sequence[Any], options: Options, facts: Sequence[Any]) -> tuple[Store, str] | None:
    """Returns the store of graphs, and a graph's key there. None if the graph cannot be cached.

    Args:
        module: TorchDynamo's graph, on the CPU.
        example_inputs: the graph's inputs.
        options: the options of the compilation.
        facts: further plain data on which the ATen graph depends.
    """
    wants_gradients = torch.is_grad_enabled() and any(isinstance(item, torch.Tensor) and item.requires_grad for item in example_inputs)
    store = None if wants_gradients else options.store("graphs")
    key = key_of(module, example_inputs, facts) if store is not None else None
    return (store, key) if store is not None and key is not None else None


def load_from_cache(
    location: tuple[Store, str], example_inputs: Sequence[Any], number: int, build: Callable[[AtenGraph], Any], facts: GraphFacts
) -> Callable[..., Any] | None:
    """Returns the compiled function of a graph that an earlier process has captured. None if the store does not have the graph.

    Args:
        location: the result of `cache_location`.
        example_inputs: TorchDynamo's inputs.
        number: the graph's number.
        build: returns the runner of an ATen graph.
        facts: receives the facts about the graph.
    """
    cached = CachedGraph.find(*location)
    if cached is None:
        return None
    with capture_lock.capturing():
        graph = cached.graph(f"dynaxla_{number}_inference")
        facts.check_aten(graph.module)
        facts.written_inputs = cached.written
        runner = build(graph)
    metrics.add("graphs_from_cache")
    overlaps = AliasGuard(example_inputs, cached.written, cached.static, static=True)
    if overlaps.is_needed:
        facts.overlaps = overlaps
    return cached.with_writes(runner)


def _written_inputs(metadata: Any, inputs: Sequence[Any]) -> tuple[set[int], set[int]]:
    """Returns the positions of TorchDynamo's inputs that a graph writes to, and the positions of parameters and buffers.

    Both sets are empty for a graph without writes. If AOTAutograd has another number of inputs than TorchDynamo, positions do not
    correspond: returns all positions and an empty set.

    Args:
        metadata: AOTAutograd's `ViewAndMutationMeta`, or None if there is none.
        inputs: TorchDynamo's example inputs.
    """
    if metadata is None or not any(info.mutates_data for info in metadata.input_info):
        return set(), set()
    if len(metadata.input_info) != len(inputs):
        return set(range(len(inputs))), set()
    return {position for position, info in enumerate(metadata.input_info) if info.mutates_data}, set(metadata.static_input_indices or ())


def _metadata() -> Any:
    """Returns AOTAutograd's `ViewAndMutationMeta` of the graph that it compiles now; None outside of TorchDynamo."""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None
