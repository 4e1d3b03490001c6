"""Tests of `dynaxla.explain`: the explanations of functions, modules and steps, and that state does not change."""

from __future__ import annotations

import copy
import random
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import dynaxla
from dynaxla.explained import formatting
from dynaxla.explained.explanation import Line
from dynaxla.observe import engine_decisions, events, metrics

seen: list[float] = []


class Planted(nn.Module):
    """A module with one line that computes a thousand times as much as the other lines."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(768, 768))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = x[:4].sin()
        z = x @ self.weight  # the costliest
        return z[:4] + y


def line_of(source: str) -> int:
    """Returns the number of the line of this file that contains this text."""
    with open(__file__) as file:
        return next(number for number, row in enumerate(file, 1) if source in row)


def test_explanation_of_a_module() -> None:
    model, x = Planted(), torch.randn(768, 768)
    before, states = copy.deepcopy(model.state_dict()), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    counted = metrics.snapshot()
    with torch.no_grad():
        explanation = dynaxla.explain(model, x)
    counts = metrics.snapshot()
    assert not explanation.error
    assert not explanation.breaks
    assert explanation.name == "Planted"
    (graph,) = explanation.graphs
    (program,) = graph.programs
    assert len(explanation.captured) == counts["graphs"] - counted.get("graphs", 0) == 1
    assert counts["compile"] - counted.get("compile", 0) == len(graph.programs)
    assert program.runs == counts["calls"] - counted.get("calls", 0) >= 2
    assert graph.ops["aten.mm.default"] == graph.ops["aten.sin.default"] == 1
    assert graph.kinds["matmul"] == 1
    assert graph.parameters[0] == 2
    assert graph.parameters[1] == 768 * 768 * 4 + 4
    assert [(tensor.name, tensor.text, tensor.bytes) for tensor in graph.inputs] == [("x", "f32[768, 768]", x.nbytes)]
    assert program.memory is not None
    assert program.memory.arguments == 2 * x.nbytes + 4
    assert program.seconds.keys() >= {"trace", "lower", "compile"}
    assert any(implementation.op == "contraction" and implementation.others for implementation in graph.implementations)
    assert not graph.copies
    costliest = explanation.costs[0]
    assert (costliest.line.number, costliest.line.function) == (line_of("# the costliest"), "forward")
    assert costliest.line.source.startswith("z = x @ self.weight")
    assert costliest.share > 0.5
    assert sum(cost.share for cost in explanation.costs) + (explanation.unplaced_share or 0) == pytest.approx(1)
    assert sum(explanation.phases.values()) == pytest.approx(explanation.seconds, rel=0.2)
    assert any(advice.line == costliest.line for advice in explanation.advice)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert not events.has_listeners()


def unfused(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    larger = x + 1  # nothing to fuse
    return larger, y[:, None] * 2


def test_graph_run_by_torch_has_times_and_lines() -> None:
    x, y = torch.randn(1 << 22), torch.randn(1 << 16)
    explanation = dynaxla.explain(unfused, x, y)
    (graph,) = explanation.graphs
    (program,) = graph.programs
    assert program.is_by_torch
    assert program.memory is None
    assert program.runs >= 2
    assert program.later_seconds is not None
    assert explanation.later_seconds is not None
    assert 0 < explanation.torch_seconds < explanation.later_seconds
    assert not explanation.xla_seconds
    first, second = explanation.costs
    assert {first.line.number, second.line.number} == {
        line_of("# nothing to fuse"),
        line_of("return larger"),
    }  # in any order on a busy machine
    assert first.kinds == second.kinds == (formatting.BY_TORCH,)
    assert first.share > second.share > 0
    assert first.seconds + second.seconds <= program.later_seconds * 1.001, "times are medians of a few runs"
    assert explanation.unplaced_share == 0
    assert formatting.program_row(program)[0] == formatting.BY_TORCH
    assert f"on {formatting.BY_TORCH}" in " ".join(str(explanation).split())
    assert dict(formatting.summary(explanation))["run by torch, with nothing to fuse"] == "1 graph"
    assert dict(formatting.summary(explanation))["compiled"] == "0 programs"
    assert [
        (implementation.op, implementation.implementation, implementation.others, implementation.is_measurable)
        for implementation in graph.implementations
    ] == [("graph", "torch", ("xla",), False)]


def test_error_in_a_graph_run_by_torch_is_that_of_eager_mode() -> None:
    x, index = torch.randn(1 << 17), torch.tensor([1 << 17])
    with pytest.raises(IndexError) as expected:
        torch.index_select(x, 0, index)
    explanation = dynaxla.explain(lambda x, index: torch.index_select(x, 0, index), x, index)
    assert explanation.error == f"IndexError: {expected.value}"


def test_forced_implementation_is_not_measurable(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(64, 64)
    for forced, is_measurable in ("", True), ("contraction=xla", False):
        monkeypatch.setenv("DYNAXLA_IMPLEMENTATIONS", forced)
        compiled = torch.compile(lambda x: (x @ x).sin(), backend="dynaxla")
        implementations = [
            implementation
            for graph in dynaxla.explain(compiled, x).graphs
            for implementation in graph.implementations
            if implementation.op == "contraction"
        ]
        assert [implementation.is_measurable for implementation in implementations] == [is_measurable]


def test_explanation_shows_an_earlier_choice_of_engine() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x @ x).relu()

    compiled = torch.compile(function, backend="dynaxla_auto", options={"engines": ["dynaxla", "eager"]})
    x = torch.ones(10, 10)
    engine_decisions.reset()
    with torch.no_grad():
        assert dynaxla.explain(compiled, x).graphs[0].engine == "not decided yet"
        while not engine_decisions.verdicts():
            compiled(x)
        (graph,) = dynaxla.explain(compiled, x).graphs
        (other,) = dynaxla.explain(compiled, torch.ones(11, 11)).graphs
    assert graph.engine == engine_decisions.verdicts()[0]["chosen"]
    assert graph.engine_note.startswith("decided in calls before these; the fastest")
    assert other.engine == "not decided yet", "the choice is only for one size"
    engine_decisions.reset()


def breaks(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    seen.append(float(y.sum()))
    z = y.cos() + draw()
    if z.sum() > 0:
        z = z * 2
    return z


@torch.compiler.disable
def draw() -> float:
    return random.random() + float(np.random.rand())


def test_graph_breaks_have_lines_and_advice() -> None:
    explanation = dynaxla.explain(breaks, torch.ones(8))
    lines = {item.line.number: item for item in explanation.breaks if item.line is not None}
    assert {line_of("seen.append("), line_of("+ draw()"), line_of("if z.sum()")} <= lines.keys()
    assert lines[line_of("if z.sum()")].reason == "Data-dependent branching"
    advised = [(advice.line.number, advice.action) for advice in explanation.advice if advice.line is not None]
    assert any(number == line_of("if z.sum()") and "torch.where" in text for number, text in advised)
    assert any(number == line_of("+ draw()") and "torch.compiler.disable" in text for number, text in advised)
    assert not seen, "a global list was changed"
    assert len(explanation.captured) >= 3


@pytest.mark.parametrize("way", ["function", "module", "itself"])
def test_explain_keeps_compiled_functions(way: str) -> None:
    model = nn.Linear(4, 4)

    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x).relu()

    x = torch.randn(3, 4)
    if way == "itself":
        model.compile(backend="dynaxla")
        compiled: Any = model
    else:
        compiled = torch.compile(model if way == "module" else function, backend="dynaxla", options={"exact_rng": True})
    with torch.no_grad():
        expected = compiled(x)
        graphs = metrics.snapshot()["graphs"]
        explanation = dynaxla.explain(compiled, x)
        second_explanation = dynaxla.explain(compiled, x)
        assert metrics.snapshot()["graphs"] == graphs + 2
        assert torch.equal(compiled(x), expected)
        compiled(torch.randn(3, 4))
    assert metrics.snapshot()["graphs"] == graphs + 2, "a graph was compiled again"
    (graph,) = explanation.graphs
    assert graph.ops == second_explanation.graphs[0].ops
    assert len(second_explanation.graphs) == 1
    if way != "itself":
        assert {implementation.implementation for implementation in graph.implementations if implementation.op == "contraction"} == {"xla"}


def test_explanation_of_a_step_restores_state() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    @dynaxla.compile_step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    x = torch.randn(16, 8)
    before = copy.deepcopy(model.state_dict())
    explanation = dynaxla.explain(step, x)
    assert all(captured.is_step for captured in explanation.captured)
    assert not explanation.step_modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    step(x)
    state = copy.deepcopy(optimizer.state_dict())
    dynaxla.explain(step, x)
    current_state = optimizer.state_dict()
    assert current_state["state"].keys() == state["state"].keys()
    for number, values in current_state["state"].items():
        assert all(torch.equal(value, state["state"][number][name]) for name, value in values.items())


def test_explanation_of_a_step_in_eager_mode() -> None:
    weight = torch.randn(4, requires_grad=True)
    losses: list[float] = []

    @dynaxla.compile_step
    def step() -> None:
        loss = weight.square().sum()
        loss.backward()
        losses.append(loss.item())

    explanation = dynaxla.explain(step)
    assert any("in eager mode" in way for way in explanation.step_modes)
    assert any("recorded as one program" in advice.action for advice in explanation.advice)
    assert not losses
    assert weight.grad is None


def test_explanation_of_forward_and_backward_pass() -> None:
    model = nn.Linear(4, 1)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    explanation = dynaxla.explain(train, torch.randn(3, 4))
    assert {graph.phase for graph in explanation.graphs} == {"forward", "backward"}
    assert any("compile_step" in advice.action for advice in explanation.advice)
    assert model.weight.grad is None


def test_copies_of_inputs_have_reasons() -> None:
    rows, misaligned = torch.randn(64, 128)[:, ::2], torch.randn(1001)[1:]
    explanation = dynaxla.explain(lambda x, y: x.sin().sum() + y.sum(), rows, misaligned)
    copies = {copy.argument: copy for graph in explanation.graphs for copy in graph.copies}
    assert "strides" in copies["x"].reason
    assert copies["x"].bytes == rows.nbytes
    assert "aligned" in copies["y"].reason
    assert copies["y"].later >= 1
    assert {"contiguous" in advice.action or "slice" in advice.action for advice in explanation.advice} >= {True}


def test_changing_sizes_have_advice() -> None:
    explanation = dynaxla.explain(lambda a, b, c: [inner(x) for x in (a, b, c)], *(torch.randn(n, 4) for n in (2, 3, 4)))
    assert any(item.line.function == "inner" and "size mismatch" in item.reason for item in explanation.recompilations)
    assert any("mark_dynamic" in advice.action for advice in explanation.advice)
    programs = [program for graph in explanation.graphs for program in graph.programs if program.sizes]
    assert programs, "the second capture has dynamic sizes"


def inner(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def test_explanation_of_an_error_restores_state() -> None:
    x = torch.ones(3)

    def fails(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        seen.append(1.0)
        raise ValueError("<its own>")

    explanation = dynaxla.explain(fails, x)
    assert explanation.error == "ValueError: <its own>"
    assert explanation.advice[0].action.startswith("Fix this error")
    assert "&lt;its own&gt;" in explanation.html()
    assert torch.equal(x, torch.ones(3))
    assert not seen
    assert not events.has_listeners()


def test_error_in_a_later_call_is_a_note() -> None:
    cache = torch.zeros(3)
    position = [0]

    def writes(x: torch.Tensor) -> torch.Tensor:
        if position[0] == 1:
            raise IndexError("full")
        position[0] += 1
        cache[position[0]] = x.sum()
        return x * 2

    explanation = dynaxla.explain(writes, torch.ones(2))
    assert not explanation.error
    assert any("full" in note for note in explanation.notes)
    assert position == [0]
    assert torch.equal(cache, torch.zeros(3))


@pytest.mark.parametrize("function", [lambda: 3, lambda: print("no tensor"), lambda: draw()])
def test_explanation_without_compiled_code(function: Callable[[], Any]) -> None:
    explanation = dynaxla.explain(function)
    assert not explanation.captured
    assert not explanation.costs
    assert any("torch.compile" in advice.action for advice in explanation.advice)
    assert "<html" in explanation.html()
    assert explanation.name in str(explanation)


def test_other_backends_are_refused() -> None:
    with pytest.raises(dynaxla.errors.ArgumentError, match="eager"):
        dynaxla.explain(torch.compile(lambda x: x + 1, backend="eager"), torch.ones(1))
    with pytest.raises(dynaxla.errors.ArgumentError, match="compiled with dynaxla_retrace at every call"):
        dynaxla.explain(torch.compile(lambda x: x + 1, backend="dynaxla_retrace"), torch.ones(1))
    with pytest.raises(dynaxla.errors.ArgumentError, match="takes a function"):
        dynaxla.explain(3)  # type: ignore[arg-type]


def test_explanation_has_own_threads_but_no_others() -> None:
    begin, done = threading.Event(), threading.Event()

    def other() -> None:
        begin.wait()
        torch.compile(lambda x: x.tan().tan(), backend="dynaxla")(torch.ones(5))
        done.set()

    @torch.compiler.disable
    def own(x: torch.Tensor) -> None:
        begin.set()
        done.wait()
        helper = threading.Thread(target=lambda: torch.compile(lambda x: x.cosh(), backend="dynaxla")(x))
        helper.start()
        helper.join()

    thread = threading.Thread(target=other)
    thread.start()
    explanation = dynaxla.explain(lambda x: own(x), torch.ones(4))
    thread.join()
    assert not explanation.error
    ops = {op for graph in explanation.graphs for op in graph.ops}
    assert ops == {"aten.cosh.default"}


def test_names_and_lines_of_a_sequence_of_modules() -> None:
    """No line of the user's code runs: costs have modules instead of lines, and inputs the names of forward's arguments."""
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

    def train(batch: torch.Tensor) -> torch.Tensor:
        loss = net(batch).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        explanation = dynaxla.explain(net, torch.randn(16, 32))
    (graph,) = explanation.graphs
    assert [tensor.name for tensor in graph.inputs] == ["input"]
    assert str(explanation.captured[0].line) == 'module "0" (Linear)'
    assert {str(cost.line) for cost in explanation.costs} <= {'module "0" (Linear)', 'module "1" (GELU)', 'module "2" (Linear)'}
    assert explanation.costs
    assert "external_utils" not in str(explanation)
    assert len(repr(explanation)) < 120
    assert repr(explanation).startswith("<Explanation of Sequential: 1 graph")
    trained = dynaxla.explain(train, torch.randn(16, 32))
    names = [tensor.name for graph in trained.graphs for tensor in (*graph.inputs, *graph.outputs)]
    assert not any(name.startswith(("primals", "tangents", "args")) for name in names), names
    assert "the gradient of net.0.weight" in names


def test_line_of_a_notebook_names_the_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def format_code_name(file: str) -> tuple[str, str] | None:
        return ("Cell", "In[4]") if file == "/tmp/ipykernel_1/2.py" else None

    shell = types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name=format_code_name))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert str(Line.at("/tmp/ipykernel_1/2.py", 6, "forward")) == "Cell In[4], line 6, in forward"
    assert str(Line.at("/tmp/ipykernel_1/2.py", 6, "<module>")) == "Cell In[4], line 6"
    assert str(Line.at("/home/model.py", 6, "forward")) == "model.py:6, in forward"
