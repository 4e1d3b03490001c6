"""Tests of engine/scheduler.py: schedules of several programs, the inputs of each part, and the values that are kept alive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._functorch._aot_autograd import descriptors
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.capture.graph import AtenGraph, Phase, written_inputs
from dynaxla.config import Options
from dynaxla.engine.frozen_values import FrozenValues
from dynaxla.engine.retrace import RetracedProgram
from dynaxla.engine.schedule import Schedule
from dynaxla.engine.scheduler import Scheduler, engine_for
from dynaxla.engine.xla import CompiledGraph
from dynaxla.observe import coverage
from dynaxla.passes.aten.split import split


class RecordingTorchEngine:
    """An engine that runs each graph with torch, and records the graphs."""

    def __init__(self) -> None:
        self.graphs: list[AtenGraph] = []
        self.before_each: Callable[[], object] = lambda: None

    def runner(self, graph: AtenGraph) -> Any:
        self.graphs.append(graph)

        class Runner:
            name = graph.name

            def __call__(_, args: list[Any]) -> Sequence[Any]:
                self.before_each()
                results = graph.module(*args)
                args.clear()
                return results

            def executables(_) -> list[Any]:
                return [graph.name]

        return Runner()


def split_program(phase: Phase = "inference") -> tuple[Schedule, RecordingTorchEngine]:
    """Returns a schedule of three parts. torch runs the second one, and the last one reads a weight."""

    def function(weight: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        return [(x.sin().cos() * weight).exp()]

    engine = RecordingTorchEngine()
    module = make_fx(function, tracing_mode="fake")(torch.ones(3), torch.ones(3))
    graph = AtenGraph("whole", module, static=(0,), phase=phase)
    parts = split(module, lambda node: node.target is torch.ops.aten.cos.default)
    return Scheduler(engine, Options()).split_schedule(graph, parts), engine


@pytest.mark.parametrize(("phase", "phase_of_parts"), [("inference", "inference"), ("forward", "inference"), ("backward", "backward")])
def test_parts_have_parameters_and_phase(phase: Phase, phase_of_parts: Phase) -> None:
    program, engine = split_program(phase)
    assert [graph.name for graph in engine.graphs] == ["whole_part0", "whole_part2"] == program.executables()
    position = [str(node) for node in program.steps[2].inputs].index("weight_1")
    assert [graph.static for graph in engine.graphs] == [(), (position,)]
    assert {graph.phase for graph in engine.graphs} == {phase_of_parts}
    weight, x = torch.randn(3), torch.randn(3)
    args = [weight, x]
    torch.testing.assert_close(program(args)[0], (x.sin().cos() * weight).exp())
    assert args == []


def test_values_are_freed_after_their_last_read() -> None:
    program, engine = split_program()
    x = torch.randn(3)
    gone, alive = weakref.ref(x), []
    engine.before_each = lambda: alive.append(gone() is not None)
    args = [torch.randn(3), x]
    del x
    program(args)
    assert alive == [True, False]


@pytest.mark.parametrize("case", ["nothing", "an input, at the end", "an input, between the parts"])
def test_parts_before_writes_wait_for_checks(case: str) -> None:
    module = make_fx(lambda x: [x.sin().cos().exp()], tracing_mode="fake")(torch.ones(3))
    (x,) = module.graph.find_nodes(op="placeholder")
    cosine = next(node for node in module.graph.nodes if node.target is torch.ops.aten.cos.default)
    kernel_nodes = {cosine}
    if case == "an input, at the end":
        x.meta["desc"] = descriptors.PlainAOTInput(0)
        module.graph.output_node().meta["desc"] = [descriptors.InputMutationAOTOutput(descriptors.PlainAOTInput(0))]
    elif case != "nothing":
        with module.graph.inserting_after(cosine):
            kernel_nodes.add(module.graph.call_function(torch.ops.aten.copy_.default, (x, cosine)))
    engine = RecordingTorchEngine()
    Scheduler(engine, Options()).split_schedule(AtenGraph("whole", module), split(module, kernel_nodes.__contains__))
    assert [graph.waits_for_checks for graph in engine.graphs] == [case != "nothing"] * 2


def test_options_choose_the_engine() -> None:
    graph = AtenGraph("graph", make_fx(lambda x: [x + 1], tracing_mode="fake")(torch.ones(3)))
    assert type(engine_for(Options()).runner(graph)) is CompiledGraph
    assert type(engine_for(Options(), retrace=True).runner(graph)) is RetracedProgram
    frozen = AtenGraph("graph", make_fx(lambda x, y: [x.sin() + y], tracing_mode="fake")(torch.ones(3), torch.ones(3)), static=(0,))
    assert type(engine_for(Options()).runner(frozen)) is CompiledGraph
    steps = engine_for(Options(freeze=True)).runner(frozen).steps
    assert [type(step.run) for step in steps] == [FrozenValues, CompiledGraph]


def test_positions_and_descriptions_after_counters_are_split_off() -> None:
    module = make_fx(lambda n, x, weight: (n + 1, x * weight, x + 1), tracing_mode="symbolic")(5, torch.ones(3), torch.ones(3))
    _, x, weight = module.graph.find_nodes(op="placeholder")
    x.meta["desc"], weight.meta["desc"] = descriptors.PlainAOTInput(1), descriptors.PlainAOTInput(2)
    plain = descriptors.PlainAOTOutput(0)
    module.graph.output_node().meta["desc"] = [plain, plain, descriptors.InputMutationAOTOutput(descriptors.PlainAOTInput(1))]
    engine = RecordingTorchEngine()
    program = Scheduler(engine, Options()).runner(AtenGraph("graph", module, static=(2,)))
    assert isinstance(program, Schedule)
    assert [step.kind.value for step in program.steps] == ["python", "program"]
    (rest,) = engine.graphs
    assert rest.static == (1,)
    assert written_inputs(rest.module.graph) == {1: 0}
    args = [7, torch.full((3,), 2.0), torch.full((3,), 3.0)]
    number, product, written = program(args)
    assert (number, product.tolist(), written.tolist(), args) == (8, [6.0] * 3, [3.0] * 3, [])


def compile_fullgraph(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="dynaxla", fullgraph=True)


@pytest.mark.parametrize("backend", ["dynaxla", "dynaxla_retrace"])
def test_sizes_that_depend_on_values(backend: str) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        chosen = (x * 2)[x > 0]
        indices = x.nonzero()
        y.add_(chosen.sum())
        return chosen * 3 + 1, indices.float() @ torch.ones(2, 2), y[:1], chosen

    coverage.reset()
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(3):
        x, y = torch.randn(5, 6), torch.zeros(3)
        mine, theirs = y.clone(), y.clone()
        torch.testing.assert_close(compiled(x, mine), function(x, theirs))
        torch.testing.assert_close(mine, theirs)
    assert coverage.snapshot()["aten.nonzero.default"]["fallback"] == 1


def test_gradients_through_a_split_graph() -> None:
    x = torch.randn(6, requires_grad=True)
    mask = torch.tensor([True, False, True, True, False, True])

    def function(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (x.sin()[mask] ** 2).sum()

    (expected,) = torch.autograd.grad(function(x, mask), x)
    (actual,) = torch.autograd.grad(compile_fullgraph(function)(x, mask), x)
    torch.testing.assert_close(actual, expected)


def test_number_from_a_tensor() -> None:
    def function(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        number = index.item()
        return x * number + 1

    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        compiled = compile_fullgraph(function)
        for number in (2, 5):
            x = torch.randn(3)
            torch.testing.assert_close(compiled(x, torch.tensor(number)), x * number + 1)


def test_views_whose_offsets_depend_on_values() -> None:
    def function(x: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second = indices.tolist()
        torch._check(first >= 0)
        torch._check(second >= first)
        torch._check(second <= 5)
        return torch.split(x, [first, second - first, 5 - second])

    x, indices = torch.randn(5, 3), torch.tensor([1, 3])
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        pieces = compile_fullgraph(function)(x, indices)
    assert [piece.data_ptr() - x.data_ptr() for piece in pieces] == [0, 12, 36]
    torch.testing.assert_close(pieces, function(x, indices))
