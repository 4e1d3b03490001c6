"""What torch.compile calls: found by name, refuses what XLA cannot hold, and gives what it was asked for."""

from __future__ import annotations

import importlib.metadata
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import dynaxla
from dynaxla import backend
from dynaxla.config import Options
from dynaxla.errors import OptionError, UnsupportedTensor, UnsupportedVersion
from dynaxla.observe import coverage, metrics
from support import internals

pytestmark = pytest.mark.quick


def test_torch_finds_them_by_name() -> None:
    found = {
        entry.name: entry.load() for entry in importlib.metadata.entry_points(group="torch_dynamo_backends") if "dynaxla" in entry.name
    }
    assert found == {
        "dynaxla": backend.dynaxla,
        "dynaxla_auto": backend.dynaxla_auto,
        "dynaxla_retrace": backend.dynaxla_retrace,
    }


def test_modes_of_torch_compile_reach_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = internals.seen_options(monkeypatch)
    for mode in ("reduce-overhead", "max-autotune"):
        torch.compile(torch.exp, backend="dynaxla", mode=mode)(torch.randn(3))
        torch._dynamo.reset()
    assert seen == [Options(), Options(tune=True)]


def test_sparse_tensor_at_the_backend() -> None:
    module = torch.fx.symbolic_trace(lambda x: x * 2)
    with pytest.raises(dynaxla.errors.UnsupportedTensor, match=r"sparse(.|\n)*to_dense"):
        backend.dynaxla(module, [torch.eye(3).to_sparse()])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_tensor_at_the_backend() -> None:
    module = torch.fx.symbolic_trace(lambda x: x * 2)
    quantized = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    with pytest.raises(dynaxla.errors.UnsupportedTensor, match=r"quantized(.|\n)*dequantize"):
        backend.dynaxla(module, [quantized])


@pytest.mark.parametrize(
    ("implementations", "options"), [("convolution=nothing", {}), ("", {"cache": "/dev/null/here"})], ids=["implementation", "directory"]
)
def test_options_that_cannot_be_met_are_refused_before_anything_is_captured(
    implementations: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAXLA_IMPLEMENTATIONS", implementations)
    graphs = metrics.snapshot().get("graphs", 0)
    with pytest.raises(OptionError):
        backend.dynaxla(torch.fx.symbolic_trace(lambda x: x.exp()), [torch.ones(3)], options=options)
    assert metrics.snapshot().get("graphs", 0) == graphs


def test_a_torch_that_pickles_inductors_results_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.no_pickled_programs(monkeypatch)
    with torch._functorch.config.patch(force_autograd_cache=True), pytest.raises(UnsupportedVersion, match=r"aot_compile.*\n.*cache"):
        torch.compile(lambda x: x + 1, backend="dynaxla")(torch.ones(2))


def test_an_error_shows_where_in_dynaxla_it_arose() -> None:
    """With torch's setting for full tracebacks; without it, the frames of users and the innermost one are left."""
    with torch._dynamo.config.patch(verbose=True), pytest.raises(UnsupportedTensor) as raised:
        torch.compile(torch.exp, backend="dynaxla")(torch.ones(3, device="meta"))
    files = {Path(frame.filename).name for frame in traceback.extract_tb(raised.value.__traceback__)}
    assert {"backend.py", "inputs.py"} <= files


@pytest.mark.parametrize("retrace", [False, True])
def test_a_graph_outside_of_torchdynamo(retrace: bool) -> None:
    module = torch.fx.symbolic_trace(lambda x, y: (x @ y, x + 1))
    x, y = torch.randn(2, 3), torch.randn(3, 4)
    with torch.no_grad():
        compiled = (backend.dynaxla_retrace if retrace else backend.dynaxla)(module, [x, y])
        torch.testing.assert_close(compiled(x, y), [x @ y, x + 1])


def test_an_aten_graph_may_write_to_its_inputs() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        x.mul_(y)
        return [x + 1]

    x, y = torch.randn(3), torch.randn(3)
    module = make_fx(function)(x.clone(), y)
    with torch.no_grad():
        compiled = backend.compile_graph(module, [x, y], Options())
        mine, theirs = x.clone(), x.clone()
        torch.testing.assert_close(compiled(mine, y), function(theirs, y))
        torch.testing.assert_close(mine, theirs)


def test_what_aotautograd_overlooks_is_left_to_torch_and_said() -> None:
    def write(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        part.mul_(3)
        return whole.sum()

    coverage.reset()
    whole = torch.arange(20.0).view(5, 4)
    compiled = torch.compile(write, backend="dynaxla", fullgraph=True)
    assert compiled(whole[1:3, 1:3], whole).item() == 190 + 2 * (5 + 6 + 9 + 10)
    assert coverage.snapshot()["a graph"]["fallback"] == 1


def test_every_graph_has_a_name_of_its_own(tmp_path: Path) -> None:
    for function in (torch.sin, torch.cos):
        torch.compile(function, backend="dynaxla", options={"dump": str(tmp_path)})(torch.ones(3, requires_grad=True)).sum().backward()
    names = {file.name.partition(".")[0] for file in tmp_path.iterdir() if file.name.endswith(".aten.txt")}
    assert len(names) == 4
    assert {name.rpartition("_")[2] for name in names} == {"forward", "backward"}


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda"), "cuda:0", torch.device("cuda", 1), "cpu", None], ids=str)
def test_which_graphs_name_whatever_gpu_is_current(device: Any) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.zeros, (3,), {"device": device})
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert backend._names_current_gpu(module) is (str(device) == "cuda")
    graph.call_method("to", (x, device))
    assert backend._names_current_gpu(module) is (str(device) == "cuda")
    graph.call_method("cuda", (x,))
    assert backend._names_current_gpu(module)


def test_the_accelerator_is_what_ops_are_taken_apart_for() -> None:
    """Also where only what is made inside of the graph is on it."""
    mode = FakeTensorMode()
    graph = torch.fx.Graph()
    node = graph.placeholder("x")
    with mode:
        node.meta["example_value"] = torch.empty(3, device="cuda:1")
    graph.output(node)
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert backend._main_device(module, [torch.ones(3)]) == torch.device("cuda:1")
    del node.meta["example_value"]
    assert backend._main_device(module, [torch.ones(3)]) == torch.device("cpu")
