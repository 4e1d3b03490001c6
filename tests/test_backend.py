"""Tests of the backends, which torch.compile calls: their names, options, and refused inputs."""

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


def test_entry_points_name_the_backends() -> None:
    backends = {
        entry.name: entry.load() for entry in importlib.metadata.entry_points(group="torch_dynamo_backends") if "dynaxla" in entry.name
    }
    assert backends == {
        "dynaxla": backend.dynaxla,
        "dynaxla_auto": backend.dynaxla_auto,
        "dynaxla_retrace": backend.dynaxla_retrace,
    }


def test_modes_of_torch_compile_become_options(monkeypatch: pytest.MonkeyPatch) -> None:
    options = internals.seen_options(monkeypatch)
    for mode in ("reduce-overhead", "max-autotune"):
        torch.compile(torch.exp, backend="dynaxla", mode=mode)(torch.randn(3))
        torch._dynamo.reset()
    assert options == [Options(), Options(tune=True)]


def test_sparse_tensor_is_refused() -> None:
    module = torch.fx.symbolic_trace(lambda x: x * 2)
    with pytest.raises(dynaxla.errors.UnsupportedTensor, match=r"sparse(.|\n)*to_dense"):
        backend.dynaxla(module, [torch.eye(3).to_sparse()])


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantized_tensor_is_refused() -> None:
    module = torch.fx.symbolic_trace(lambda x: x * 2)
    quantized = torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8)
    with pytest.raises(dynaxla.errors.UnsupportedTensor, match=r"quantized(.|\n)*dequantize"):
        backend.dynaxla(module, [quantized])


@pytest.mark.parametrize(
    ("implementations", "options"), [("convolution=nothing", {}), ("", {"cache": "/dev/null/here"})], ids=["implementation", "directory"]
)
def test_invalid_options_are_refused_before_a_graph_is_captured(
    implementations: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAXLA_IMPLEMENTATIONS", implementations)
    graphs = metrics.snapshot().get("graphs", 0)
    with pytest.raises(OptionError):
        backend.dynaxla(torch.fx.symbolic_trace(lambda x: x.exp()), [torch.ones(3)], options=options)
    assert metrics.snapshot().get("graphs", 0) == graphs


def test_aot_compile_is_refused_if_torch_pickles_only_inductors_results(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.no_pickled_programs(monkeypatch)
    with torch._functorch.config.patch(force_autograd_cache=True), pytest.raises(UnsupportedVersion, match=r"aot_compile.*\n.*cache"):
        torch.compile(lambda x: x + 1, backend="dynaxla")(torch.ones(2))


def test_verbose_error_has_the_frames_of_dynaxla() -> None:
    """Without torch's verbose setting, an error has only the users' frames and the innermost frame."""
    with torch._dynamo.config.patch(verbose=True), pytest.raises(UnsupportedTensor) as raised:
        torch.compile(torch.exp, backend="dynaxla")(torch.ones(3, device="meta"))
    files = {Path(frame.filename).name for frame in traceback.extract_tb(raised.value.__traceback__)}
    assert {"backend.py", "inputs.py"} <= files


@pytest.mark.parametrize("retrace", [False, True])
def test_call_of_a_backend_outside_torch_dynamo(retrace: bool) -> None:
    module = torch.fx.symbolic_trace(lambda x, y: (x @ y, x + 1))
    x, y = torch.randn(2, 3), torch.randn(3, 4)
    with torch.no_grad():
        compiled = (backend.dynaxla_retrace if retrace else backend.dynaxla)(module, [x, y])
        torch.testing.assert_close(compiled(x, y), [x @ y, x + 1])


def test_aten_graph_that_writes_to_an_input() -> None:
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


def test_overlapping_inputs_fall_back_to_torch() -> None:
    def write(part: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        part.mul_(3)
        return base.sum()

    coverage.reset()
    base = torch.arange(20.0).view(5, 4)
    compiled = torch.compile(write, backend="dynaxla", fullgraph=True)
    assert compiled(base[1:3, 1:3], base).item() == 190 + 2 * (5 + 6 + 9 + 10)
    assert coverage.snapshot()["a graph"]["fallback"] == 1


def test_graphs_have_unique_names(tmp_path: Path) -> None:
    for function in (torch.sin, torch.cos):
        torch.compile(function, backend="dynaxla", options={"dump": str(tmp_path)})(torch.ones(3, requires_grad=True)).sum().backward()
    names = {file.name.partition(".")[0] for file in tmp_path.iterdir() if file.name.endswith(".aten.txt")}
    assert len(names) == 4
    assert {name.rpartition("_")[2] for name in names} == {"forward", "backward"}


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda"), "cuda:0", torch.device("cuda", 1), "cpu", None], ids=str)
def test_names_current_gpu(device: Any) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.zeros, (3,), {"device": device})
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert backend._names_current_gpu(module) is (str(device) == "cuda")
    graph.call_method("to", (x, device))
    assert backend._names_current_gpu(module) is (str(device) == "cuda")
    graph.call_method("cuda", (x,))
    assert backend._names_current_gpu(module)


def test_main_device_is_the_accelerator() -> None:
    """Decompositions depend on it. The accelerator may have only tensors that the graph creates."""
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
