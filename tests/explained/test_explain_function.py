"""What `dynaxla.explain` tells of functions, modules and steps, and that they are as before."""

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
    """One line of it computes a thousand times as much as the others."""

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
    """The number of the line of this file that has this text."""
    with open(__file__) as file:
        return next(number for number, row in enumerate(file, 1) if source in row)


def test_a_module_is_told_of_and_as_before() -> None:
    model, x = Planted(), torch.randn(768, 768)
    before, states = copy.deepcopy(model.state_dict()), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    counted = metrics.snapshot()
    with torch.no_grad():
        found = dynaxla.explain(model, x)
    now = metrics.snapshot()
    assert not found.error
    assert not found.breaks
    assert found.name == "Planted"
    (graph,) = found.graphs
    (program,) = graph.programs
    assert len(found.captured) == now["graphs"] - counted.get("graphs", 0) == 1
    assert now["compile"] - counted.get("compile", 0) == len(graph.programs)
    assert program.runs == now["calls"] - counted.get("calls", 0) >= 2
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
    costliest = found.costs[0]
    assert (costliest.line.number, costliest.line.function) == (line_of("# the costliest"), "forward")
    assert costliest.line.source.startswith("z = x @ self.weight")
    assert costliest.share > 0.5
    assert sum(cost.share for cost in found.costs) + (found.unplaced or 0) == pytest.approx(1)
    assert sum(found.phases.values()) == pytest.approx(found.seconds, rel=0.2)
    assert any(advice.line == costliest.line for advice in found.advice)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]
    assert not events.has_listeners()


def alone(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    larger = x + 1  # nothing to fuse
    return larger, y[:, None] * 2


def test_a_graph_that_torch_runs_has_times_and_lines() -> None:
    x, y = torch.randn(1 << 22), torch.randn(1 << 16)
    found = dynaxla.explain(alone, x, y)
    (graph,) = found.graphs
    (program,) = graph.programs
    assert program.is_by_torch
    assert program.memory is None
    assert program.runs >= 2
    assert program.later_seconds is not None
    assert found.later_seconds is not None
    assert 0 < found.torch_seconds < found.later_seconds
    assert not found.xla_seconds
    first, second = found.costs
    assert {first.line.number, second.line.number} == {line_of("# nothing to fuse"), line_of("return larger")}  # a busy machine swaps them
    assert first.what == second.what == (formatting.BY_TORCH,)
    assert first.share > second.share > 0
    assert first.seconds + second.seconds <= program.later_seconds * 1.001, "the middle one of a few runs"
    assert found.unplaced == 0
    assert formatting.program_row(program)[0] == formatting.BY_TORCH
    assert f"on {formatting.BY_TORCH}" in " ".join(str(found).split())
    assert dict(formatting.summary(found))["run by torch, with nothing to fuse"] == "1 graph"
    assert dict(formatting.summary(found))["compiled"] == "0 programs"
    assert [
        (implementation.op, implementation.implementation, implementation.others, implementation.is_measurable)
        for implementation in graph.implementations
    ] == [("graph", "torch", ("xla",), False)]


def test_what_torch_raises_in_such_a_graph_is_eager_modes() -> None:
    x, index = torch.randn(1 << 17), torch.tensor([1 << 17])
    with pytest.raises(IndexError) as expected:
        torch.index_select(x, 0, index)
    found = dynaxla.explain(lambda x, index: torch.index_select(x, 0, index), x, index)
    assert found.error == f"IndexError: {expected.value}"


def test_implementations_that_are_wanted_are_not_to_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_engines_that_were_decided_before_are_told() -> None:
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
    assert other.engine == "not decided yet", "of other sizes nothing is known"
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


def test_breaks_have_their_lines_and_remedies() -> None:
    found = dynaxla.explain(breaks, torch.ones(8))
    lines = {item.line.number: item for item in found.breaks if item.line is not None}
    assert {line_of("seen.append("), line_of("+ draw()"), line_of("if z.sum()")} <= lines.keys()
    assert lines[line_of("if z.sum()")].reason == "Data-dependent branching"
    advised = [(advice.line.number, advice.what) for advice in found.advice if advice.line is not None]
    assert any(number == line_of("if z.sum()") and "torch.where" in what for number, what in advised)
    assert any(number == line_of("+ draw()") and "torch.compiler.disable" in what for number, what in advised)
    assert not seen, "a global list is as before"
    assert len(found.captured) >= 3


@pytest.mark.parametrize("way", ["function", "module", "itself"])
def test_what_is_compiled_stays_as_it_is(way: str) -> None:
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
        found = dynaxla.explain(compiled, x)
        again = dynaxla.explain(compiled, x)
        assert metrics.snapshot()["graphs"] == graphs + 2
        assert torch.equal(compiled(x), expected)
        compiled(torch.randn(3, 4))
    assert metrics.snapshot()["graphs"] == graphs + 2, "nothing was compiled anew"
    (graph,) = found.graphs
    assert graph.ops == again.graphs[0].ops
    assert len(again.graphs) == 1
    if way != "itself":
        assert {implementation.implementation for implementation in graph.implementations if implementation.op == "contraction"} == {"xla"}


def test_a_step_is_told_of_and_its_state_is_as_before() -> None:
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
    found = dynaxla.explain(step, x)
    assert all(captured.is_step for captured in found.captured)
    assert not found.ways
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in model.parameters())
    step(x)
    state = copy.deepcopy(optimizer.state_dict())
    dynaxla.explain(step, x)
    now = optimizer.state_dict()
    assert now["state"].keys() == state["state"].keys()
    for number, values in now["state"].items():
        assert all(torch.equal(value, state["state"][number][name]) for name, value in values.items())


def test_a_step_in_eager_mode_says_so() -> None:
    weight = torch.randn(4, requires_grad=True)
    losses: list[float] = []

    @dynaxla.compile_step
    def step() -> None:
        loss = weight.square().sum()
        loss.backward()
        losses.append(loss.item())

    found = dynaxla.explain(step)
    assert any("in eager mode" in way for way in found.ways)
    assert any("recorded as one program" in advice.what for advice in found.advice)
    assert not losses
    assert weight.grad is None


def test_a_forward_and_backward_pass() -> None:
    model = nn.Linear(4, 1)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    found = dynaxla.explain(train, torch.randn(3, 4))
    assert {graph.phase for graph in found.graphs} == {"forward", "backward"}
    assert any("compile_step" in advice.what for advice in found.advice)
    assert model.weight.grad is None


def test_copies_are_told_with_their_reasons() -> None:
    rows, misaligned = torch.randn(64, 128)[:, ::2], torch.randn(1001)[1:]
    found = dynaxla.explain(lambda x, y: x.sin().sum() + y.sum(), rows, misaligned)
    copies = {copy.argument: copy for graph in found.graphs for copy in graph.copies}
    assert "strides" in copies["x"].reason
    assert copies["x"].bytes == rows.nbytes
    assert "aligned" in copies["y"].reason
    assert copies["y"].later >= 1
    assert {"contiguous" in advice.what or "slice" in advice.what for advice in found.advice} >= {True}


def test_sizes_that_change_are_advised_about() -> None:
    found = dynaxla.explain(lambda a, b, c: [inner(x) for x in (a, b, c)], *(torch.randn(n, 4) for n in (2, 3, 4)))
    assert any(item.line.function == "inner" and "size mismatch" in item.reason for item in found.recompilations)
    assert any("mark_dynamic" in advice.what for advice in found.advice)
    programs = [program for graph in found.graphs for program in graph.programs if program.sizes]
    assert programs, "the second capture has open sizes"


def inner(x: torch.Tensor) -> torch.Tensor:
    y = x.sin()
    torch._dynamo.graph_break()
    return y.cos()


def test_an_error_is_told_and_all_is_as_before() -> None:
    x = torch.ones(3)

    def fails(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        seen.append(1.0)
        raise ValueError("<its own>")

    found = dynaxla.explain(fails, x)
    assert found.error == "ValueError: <its own>"
    assert found.advice[0].what.startswith("Fix this error")
    assert "&lt;its own&gt;" in found.html()
    assert torch.equal(x, torch.ones(3))
    assert not seen
    assert not events.has_listeners()


def test_a_later_call_may_fail() -> None:
    cache = torch.zeros(3)
    place = [0]

    def writes(x: torch.Tensor) -> torch.Tensor:
        if place[0] == 1:
            raise IndexError("full")
        place[0] += 1
        cache[place[0]] = x.sum()
        return x * 2

    found = dynaxla.explain(writes, torch.ones(2))
    assert not found.error
    assert any("full" in note for note in found.notes)
    assert place == [0]
    assert torch.equal(cache, torch.zeros(3))


@pytest.mark.parametrize("function", [lambda: 3, lambda: print("no tensor"), lambda: draw()])
def test_nothing_that_is_compiled(function: Callable[[], Any]) -> None:
    found = dynaxla.explain(function)
    assert not found.captured
    assert not found.costs
    assert any("torch.compile" in advice.what for advice in found.advice)
    assert "<html" in found.html()
    assert found.name in str(found)


def test_other_backends_are_refused() -> None:
    with pytest.raises(dynaxla.errors.ArgumentError, match="eager"):
        dynaxla.explain(torch.compile(lambda x: x + 1, backend="eager"), torch.ones(1))
    with pytest.raises(dynaxla.errors.ArgumentError, match="compiled with dynaxla_retrace at every call"):
        dynaxla.explain(torch.compile(lambda x: x + 1, backend="dynaxla_retrace"), torch.ones(1))
    with pytest.raises(dynaxla.errors.ArgumentError, match="takes a function"):
        dynaxla.explain(3)  # type: ignore[arg-type]


def test_other_threads_are_not_told_of_and_own_ones_are() -> None:
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
    found = dynaxla.explain(lambda x: own(x), torch.ones(4))
    thread.join()
    assert not found.error
    ops = {op for graph in found.graphs for op in graph.ops}
    assert ops == {"aten.cosh.default"}


def test_names_and_places_of_a_sequence_of_modules() -> None:
    """It has no line of the user's: modules are the places, and the forward's argument gives its name."""
    net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 8))

    def train(batch: torch.Tensor) -> torch.Tensor:
        loss = net(batch).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        found = dynaxla.explain(net, torch.randn(16, 32))
    (graph,) = found.graphs
    assert [tensor.name for tensor in graph.inputs] == ["input"]
    assert str(found.captured[0].line) == 'module "0" (Linear)'
    assert {str(cost.line) for cost in found.costs} <= {'module "0" (Linear)', 'module "1" (GELU)', 'module "2" (Linear)'}
    assert found.costs
    assert "external_utils" not in str(found)
    assert len(repr(found)) < 120
    assert repr(found).startswith("<Explanation of Sequential: 1 graph")
    trained = dynaxla.explain(train, torch.randn(16, 32))
    names = [tensor.name for graph in trained.graphs for tensor in (*graph.inputs, *graph.outputs)]
    assert not any(name.startswith(("primals", "tangents", "args")) for name in names), names
    assert "the gradient of net.0.weight" in names


def test_a_notebooks_cell_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def format_code_name(file: str) -> tuple[str, str] | None:
        return ("Cell", "In[4]") if file == "/tmp/ipykernel_1/2.py" else None

    shell = types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name=format_code_name))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert str(Line.at("/tmp/ipykernel_1/2.py", 6, "forward")) == "Cell In[4], line 6, in forward"
    assert str(Line.at("/tmp/ipykernel_1/2.py", 6, "<module>")) == "Cell In[4], line 6"
    assert str(Line.at("/home/model.py", 6, "forward")) == "model.py:6, in forward"
