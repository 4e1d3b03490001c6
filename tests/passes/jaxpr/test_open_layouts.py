"""Tests of passes/jaxpr/open_layouts.py: layouts that XLA chooses are reported, applied, and invisible to callers.

Layouts are open only on GPUs. These tests run on the CPU: the XLA compiler of JAX's CPU client accepts open results, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding
from torch import nn
from torch._functorch._aot_autograd import descriptors
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.capture.graph import AtenGraph, OpenLayouts
from dynaxla.config import Options
from dynaxla.engine.frozen_values import FrozenValues
from dynaxla.engine.retrace import RetracedProgram
from dynaxla.engine.scheduler import Scheduler
from dynaxla.engine.unit import CompilationUnit
from dynaxla.engine.xla import CompiledGraph
from dynaxla.errors import CompilationError
from dynaxla.observe import metrics
from dynaxla.passes.aten.freeze import freeze
from dynaxla.passes.jaxpr.open_layouts import check_closed, opens_layouts, with_open_layouts
from dynaxla.runtime import private
from support import internals

SAVED, PLAIN = descriptors.SavedForBackwardsAOTOutput(0), descriptors.PlainAOTOutput(0)


def opened(graph: AtenGraph, kind: type[CompiledGraph] = CompiledGraph) -> CompiledGraph:
    """Returns a runner on the CPU with open layouts, as on a GPU."""
    program = kind(CompilationUnit(graph, Options()))
    program.unit.opens_layouts = True
    program.unit.jax_device = jax.devices("cpu")[0]
    return program


class OpenLayoutEngine:
    """An engine whose runners have open layouts."""

    def __init__(self, kind: type[CompiledGraph] = CompiledGraph) -> None:
        self._kind = kind

    def runner(self, graph: AtenGraph) -> CompiledGraph:
        return opened(graph, self._kind)


ENTRY_POINTS = pytest.mark.parametrize(
    ("entry_points", "kind"), [("fast", CompiledGraph), ("public", CompiledGraph), ("fast", RetracedProgram)], indirect=["entry_points"]
)


@pytest.fixture(params=["fast", "public"])
def entry_points(request: pytest.FixtureRequest) -> Iterator[None]:
    """JAX's private entry points, or the public ones."""
    with private.force_public() if request.param == "public" else contextlib.nullcontext():
        yield


def traced(function: Callable[..., Any], *inputs: torch.Tensor, mode: str = "fake") -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode=mode)(*inputs)


def test_int64_constants_keep_their_dtype_when_retraced() -> None:
    """A graph is traced with 64-bit dtypes enabled, and so is its second trace: both compare an int64 index with 0."""
    sharding = SingleDeviceSharding(jax.devices("cpu")[0])
    avals = [jax.ShapeDtypeStruct((), np.int64, sharding=sharding)]
    with jax.enable_x64(True):
        first = jax.jit(lambda index: [jax.lax.ge(index, 0)]).trace(*avals)
    assert str(with_open_layouts(first, "net", avals, [], [0]).jaxpr).count("i64") > 0


def input_copies() -> int:
    return metrics.snapshot().get("input_copies", 0)


def test_no_layout_is_open_on_cpu() -> None:
    assert [platform for platform in ("cpu", "cuda") if opens_layouts(platform)] == ["cuda"]
    assert not CompiledGraph(CompilationUnit(AtenGraph("graph", traced(lambda x: [x + 1], torch.ones(3))), Options())).unit.opens_layouts


def test_xla_chooses_only_open_layouts() -> None:
    def function(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        return [x + y.T, (x * 2).T, y * 3]

    shapes = jax.ShapeDtypeStruct((30, 20), "float32"), jax.ShapeDtypeStruct((20, 30), "float32")
    found = with_open_layouts(jax.jit(function).trace(*shapes), "program", shapes, arguments=[1], results=[1])
    text = found.lower().as_text()
    arguments = text.partition(") -> (")[0]
    assert arguments.count('mhlo.layout_mode = "auto"') == 1
    assert text.count("@LayoutConstraint(") == 2, "if one result is open, XLA chooses the layouts of all results without a constraint"
    assert "@jit_program" in text
    compiled = found.lower().compile()
    assert [found.layout.major_to_minor for found in compiled.output_formats] == [(0, 1), (1, 0), (0, 1)]
    x = jnp.arange(600.0, dtype="float32").reshape(30, 20)
    for mine, theirs in zip(compiled(x, x.T), function(x, x.T), strict=True):
        assert np.array_equal(np.asarray(mine), np.asarray(theirs))


@ENTRY_POINTS
@pytest.mark.usefixtures("entry_points")
def test_saved_values_keep_their_computed_layout(kind: type[CompiledGraph]) -> None:
    """The backward program reads a saved value without a copy. Results for the caller have eager mode's strides."""

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        return [x[0] + 1, x.sin().t().contiguous(), x.sum(0)]

    x = torch.randn(30, 20)
    module = traced(forward, x)
    module.graph.output_node().meta["desc"] = [PLAIN, SAVED, SAVED]
    program = opened(AtenGraph("forward", module, phase="forward"), kind)
    for _ in range(2):
        plain, saved, total = program([x])
        expected = forward(x)
        assert (plain.stride(), saved.stride(), total.stride()) == ((1,), (1, 20), (1,))
        torch.testing.assert_close([plain, saved, total], expected)

    backward = opened(AtenGraph("backward", traced(lambda saved: [saved.cos()], expected[1]), phase="backward"))
    metrics.reset()
    (result,) = backward([saved])
    assert input_copies() == 0
    assert result.stride() == (30, 1)
    torch.testing.assert_close(result, expected[1].cos())


@pytest.fixture
def transposing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets XLA choose column-major order for matrices. XLA:CPU itself chooses row-major order for every argument."""
    internals.array_layout(monkeypatch, Format(Layout((1, 0)), SingleDeviceSharding(jax.devices("cpu")[0])))


@ENTRY_POINTS
@pytest.mark.usefixtures("entry_points", "transposing")
def test_prepared_weights_have_the_layout_that_the_program_reads(kind: type[CompiledGraph]) -> None:
    def function(weight: torch.Tensor, unread: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        return [x + (weight * 2).t() + torch.rand_like(x) * 0, x[0, 0] * (weight.sum(0) + 1)]

    weight, unread, x = torch.randn(20, 30), torch.ones(1), torch.randn(30, 20)
    graph = AtenGraph("graph", traced(function, weight, unread, x), static=(0, 1))
    frozen = freeze(graph.module, graph.static, copy_weights=False)
    assert frozen is not None
    program = Scheduler(OpenLayoutEngine(kind), Options(freeze=True)).frozen_schedule(graph, frozen)
    values = program.steps[0].run
    assert isinstance(values, FrozenValues)

    def check() -> int:
        """Calls the program, and returns the number of inputs that the call copied."""
        before = input_copies()
        torch.testing.assert_close(list(program([weight, unread, x])), function(weight, unread, x))
        return input_copies() - before

    assert check() == 1, "the first call chooses the layout, and copies the weight to it"
    assert check() == 0
    cached = values._cached
    assert cached is not None
    assert [result.stride() for result in cached.results] == [(1, 20), (1,)]
    weight.mul_(3)
    assert check() == 0, "a changed weight is prepared in that layout"
    assert values._cached is not cached


@pytest.mark.usefixtures("entry_points", "transposing")
def test_programs_for_other_sizes_use_the_first_programs_layout() -> None:
    def function(weight: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sum(0).view(30, 1) + weight.t()]

    weight, open_inputs = torch.randn(20, 30), OpenLayouts([0])
    module = traced(function, weight, torch.randn(4, 30), mode="symbolic")
    program = opened(AtenGraph("graph", module, open_inputs=open_inputs))
    for rows in (4, 5):
        x = torch.randn(rows, 30)
        torch.testing.assert_close(program([weight, x]), function(weight, x))
        assert open_inputs.orders == {0: (1, 0)}
    assert len(program.executables()) == 2
    metrics.reset()
    laid_out = weight.t().contiguous().t()
    for rows in (4, 5):
        x = torch.randn(rows, 30)
        torch.testing.assert_close(program([laid_out, x]), function(weight, x))
    assert input_copies() == 0


def test_unexpected_layout_raises() -> None:
    check_closed({0: (0, 1), 1: (1, 0), 2: (), 3: (0,)}, [1])
    with pytest.raises(CompilationError, match=r"the dimension order \[1, 0\] for array 1"):
        check_closed({0: (0, 1), 1: (1, 0)}, [0])


def test_frozen_program_on_gpu_copies_weights_of_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[AtenGraph] = []

    class RecordingEngine:
        def runner(self, graph: AtenGraph) -> CompiledGraph:
            graphs.append(graph)
            return opened(graph)

    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 3)).requires_grad_(False)
    parameters, x = list(net.parameters()), torch.randn(2, 3, 9, 9)

    def function(*inputs: torch.Tensor) -> list[torch.Tensor]:
        names = dict(net.named_parameters())
        return [torch.func.functional_call(net, dict(zip(names, inputs, strict=False)), inputs[-1])]

    internals.devices_of_graphs(monkeypatch, torch.device("cuda"))
    graph = AtenGraph("net", traced(function, *parameters, x), static=tuple(range(len(parameters))))
    runner = Scheduler(RecordingEngine(), Options(freeze=True)).runner(graph)
    prepared, rest = graphs
    assert [node.target for node in prepared.module.graph.nodes if node.op == "call_function"] == [torch.ops.aten.clone.default] * 2
    assert len(rest.open_inputs.positions) == 2
    for _ in range(2):
        torch.testing.assert_close(runner([*parameters, x])[0], net(x), rtol=1e-4, atol=1e-5)
