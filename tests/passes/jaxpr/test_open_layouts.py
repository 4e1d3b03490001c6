"""Layouts that are left to XLA: what comes of them is told, applied, and seen by nobody else.

XLA's compiler for GPUs is not here, but that of JAX's own client for the CPU takes open results, too: these tests run with it.
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

SAVED, SHOWN = descriptors.SavedForBackwardsAOTOutput(0), descriptors.PlainAOTOutput(0)


def opened(graph: AtenGraph, kind: type[CompiledGraph] = CompiledGraph) -> CompiledGraph:
    """A runner on the CPU whose layouts are left to XLA, as on a GPU."""
    program = kind(CompilationUnit(graph, Options()))
    program.unit.opens_layouts = True
    program.unit.jax_device = jax.devices("cpu")[0]
    return program


class Opening:
    """An engine of such runners."""

    def __init__(self, kind: type[CompiledGraph] = CompiledGraph) -> None:
        self._kind = kind

    def runner(self, graph: AtenGraph) -> CompiledGraph:
        return opened(graph, self._kind)


WAYS = pytest.mark.parametrize(
    ("way", "kind"), [("fast", CompiledGraph), ("public", CompiledGraph), ("fast", RetracedProgram)], indirect=["way"]
)


@pytest.fixture(params=["fast", "public"])
def way(request: pytest.FixtureRequest) -> Iterator[None]:
    """Private entry points, and the public ones beside them."""
    with private.force_public() if request.param == "public" else contextlib.nullcontext():
        yield


def traced(function: Callable[..., Any], *inputs: torch.Tensor, mode: str = "fake") -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode=mode)(*inputs)


def test_numbers_of_64_bits_stay_so() -> None:
    """JAX has them while a graph is traced, and must have them when what was traced is traced again: an index is compared with 0."""
    sharding = SingleDeviceSharding(jax.devices("cpu")[0])
    avals = [jax.ShapeDtypeStruct((), np.int64, sharding=sharding)]
    with jax.enable_x64(True):
        first = jax.jit(lambda index: [jax.lax.ge(index, 0)]).trace(*avals)
    assert str(with_open_layouts(first, "net", avals, [], [0]).jaxpr).count("i64") > 0


def input_copies() -> int:
    return metrics.snapshot().get("input_copies", 0)


def test_the_cpu_keeps_every_layout() -> None:
    assert [platform for platform in ("cpu", "cuda") if opens_layouts(platform)] == ["cuda"]
    assert not CompiledGraph(CompilationUnit(AtenGraph("graph", traced(lambda x: [x + 1], torch.ones(3))), Options())).unit.opens_layouts


def test_only_what_is_open_is_chosen() -> None:
    def function(x: jax.Array, y: jax.Array) -> list[jax.Array]:
        return [x + y.T, (x * 2).T, y * 3]

    shapes = jax.ShapeDtypeStruct((30, 20), "float32"), jax.ShapeDtypeStruct((20, 30), "float32")
    found = with_open_layouts(jax.jit(function).trace(*shapes), "program", shapes, arguments=[1], results=[1])
    text = found.lower().as_text()
    arguments = text.partition(") -> (")[0]
    assert arguments.count('mhlo.layout_mode = "auto"') == 1
    assert text.count("@LayoutConstraint(") == 2, "XLA chooses the layouts of all results if one is open, but for these"
    assert "@jit_program" in text
    compiled = found.lower().compile()
    assert [found.layout.major_to_minor for found in compiled.output_formats] == [(0, 1), (1, 0), (0, 1)]
    x = jnp.arange(600.0, dtype="float32").reshape(30, 20)
    for mine, theirs in zip(compiled(x, x.T), function(x, x.T), strict=True):
        assert np.array_equal(np.asarray(mine), np.asarray(theirs))


@WAYS
@pytest.mark.usefixtures("way")
def test_what_is_saved_lies_as_it_was_computed(kind: type[CompiledGraph]) -> None:
    """The backward program reads it where it is; what a caller sees has eager mode's strides."""

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        return [x[0] + 1, x.sin().t().contiguous(), x.sum(0)]

    x = torch.randn(30, 20)
    module = traced(forward, x)
    module.graph.output_node().meta["desc"] = [SHOWN, SAVED, SAVED]
    program = opened(AtenGraph("forward", module, phase="forward"), kind)
    for _ in range(2):
        shown, saved, total = program([x])
        expected = forward(x)
        assert (shown.stride(), saved.stride(), total.stride()) == ((1,), (1, 20), (1,))
        torch.testing.assert_close([shown, saved, total], expected)

    backward = opened(AtenGraph("backward", traced(lambda saved: [saved.cos()], expected[1]), phase="backward"))
    metrics.reset()
    (result,) = backward([saved])
    assert input_copies() == 0
    assert result.stride() == (30, 1)
    torch.testing.assert_close(result, expected[1].cos())


@pytest.fixture
def transposing(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA:CPU chooses row-major order for every argument; here it has to take the other one of two."""
    internals.array_layout(monkeypatch, Format(Layout((1, 0)), SingleDeviceSharding(jax.devices("cpu")[0])))


@WAYS
@pytest.mark.usefixtures("way", "transposing")
def test_prepared_weights_lie_as_the_program_reads_them(kind: type[CompiledGraph]) -> None:
    def function(weight: torch.Tensor, unread: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        return [x + (weight * 2).t() + torch.rand_like(x) * 0, x[0, 0] * (weight.sum(0) + 1)]

    weight, unread, x = torch.randn(20, 30), torch.ones(1), torch.randn(30, 20)
    graph = AtenGraph("graph", traced(function, weight, unread, x), static=(0, 1))
    frozen = freeze(graph.module, graph.static)
    assert frozen is not None
    program = Scheduler(Opening(kind), Options(freeze=True)).frozen_schedule(graph, frozen)
    values = program.steps[0].run
    assert isinstance(values, FrozenValues)

    def check() -> int:
        """How many inputs the call copied."""
        before = input_copies()
        torch.testing.assert_close(list(program([weight, unread, x])), function(weight, unread, x))
        return input_copies() - before

    assert check() == 1, "the first call chooses the order, and copies what lies in another"
    assert check() == 0
    kept = values._cached
    assert kept is not None
    assert [result.stride() for result in kept.results] == [(1, 20), (1,)]
    weight.mul_(3)
    assert check() == 0, "what is prepared anew is brought into that order at once"
    assert values._cached is not kept


@pytest.mark.usefixtures("way", "transposing")
def test_programs_for_other_sizes_read_the_order_that_the_first_has_chosen() -> None:
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


def test_what_xla_lays_out_unasked_is_an_error() -> None:
    check_closed({0: (0, 1), 1: (1, 0), 2: (), 3: (0,)}, [1])
    with pytest.raises(CompilationError, match=r"the dimension order \[1, 0\] for array 1"):
        check_closed({0: (0, 1), 1: (1, 0)}, [0])


def test_a_frozen_program_on_a_gpu_owns_the_weights_of_its_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[AtenGraph] = []

    class Recording:
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
    runner = Scheduler(Recording(), Options(freeze=True)).runner(graph)
    prepared, rest = graphs
    assert [node.target for node in prepared.module.graph.nodes if node.op == "call_function"] == [torch.ops.aten.clone.default] * 2
    assert len(rest.open_inputs.positions) == 2
    for _ in range(2):
        torch.testing.assert_close(runner([*parameters, x])[0], net(x), rtol=1e-4, atol=1e-5)
