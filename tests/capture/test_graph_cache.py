"""Tests of the cache of traced graphs: a graph is reused only for an equal TorchDynamo graph with equal settings."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.capture.graph import AtenGraph
from dynaxla.capture.graph_cache import CachedGraph, key_of
from dynaxla.capture.graph_text import captured_text, graph_text
from dynaxla.config import Options
from dynaxla.lowering import registry
from dynaxla.observe import metrics
from dynaxla.runtime import private
from support import internals
from support.processes.scripts import run_script

library = torch.library.Library("dynaxla_kept_test", "FRAGMENT")
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")


def captured(function: Callable[..., Any], *inputs: Any) -> tuple[GraphModule, list[Any]]:
    """Returns TorchDynamo's graph of a function, and its inputs."""
    captures: list[tuple[GraphModule, list[Any]]] = []

    def backend(module: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        captures.append((module, list(example_inputs)))
        return module.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(*inputs)
    (graph,) = captures
    return graph


def scaled(x: torch.Tensor) -> torch.Tensor:
    return x.sin() * 2


def key(function: Callable[..., Any] = scaled, *inputs: Any, options: Any = None) -> str | None:
    return key_of(*captured(function, *(inputs or (torch.ones(3, 4),))), (Options.parse(options, None).facts,))


@pytest.fixture(scope="module", autouse=True)
def _without_kernels_of_other_tests() -> Iterator[None]:
    """Hides kernels that other tests, or libraries that they import, have registered; with them, no graph is cached."""
    registered = private.implemented_in_python
    left = set(registered())
    with pytest.MonkeyPatch.context() as patch:
        internals.python_kernels(patch, lambda: [name for name in registered() if name not in left])
        yield


@pytest.fixture(scope="module")
def plain(_without_kernels_of_other_tests: None) -> str:
    result = key()
    assert result is not None
    return result


def test_equal_graphs_have_equal_keys(plain: str) -> None:
    assert key() == key(scaled, torch.zeros(3, 4)) == plain


@pytest.mark.parametrize(
    "inputs",
    [(torch.ones(3, 5),), (torch.ones(4, 3).t(),), (torch.ones(3, 4, dtype=torch.float64),), (torch.nn.Parameter(torch.ones(3, 4)),)],
    ids=["size", "stride", "dtype", "kind"],
)
def test_key_depends_on_inputs(plain: str, inputs: tuple[torch.Tensor, ...]) -> None:
    assert key(scaled, *inputs) not in (plain, None)


def test_key_depends_on_numbers(plain: str) -> None:
    assert (
        len({plain, key(lambda x: x.sin() * 3), key(lambda x: x.sin() * 3.0), key(lambda x: x.sin() * -0.0), key(lambda x: x.sin() * 0.0)})
        == 5
    )


def test_key_distinguishes_max_pool2d_from_max_pool3d() -> None:
    """torch creates both functions at the same line, and they have the same qualified name."""
    x, pools = torch.ones(1, 1, 4, 4, 4), (torch.nn.functional.max_pool2d, torch.nn.functional.max_pool3d)
    two, three = (key(lambda x, pool=pool: pool(x, 2), x if pool is pools[1] else x[0]) for pool in pools)
    assert len({two, three, None}) == 3


@pytest.mark.parametrize("options", [{"fallback": "error"}, {"exact_rng": True}, {"xla": {"a": 1}}])
def test_key_depends_on_options(plain: str, options: dict[str, Any]) -> None:
    assert key(options=options) not in (plain, None)


def test_key_depends_on_implementations(plain: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAXLA_IMPLEMENTATIONS", "contraction=xla")
    assert key() not in (plain, None)


def test_key_does_not_depend_on_options_that_change_no_program(plain: str, tmp_path: Path) -> None:
    assert key(options={"cache": str(tmp_path), "executables": 3}) == plain


@contextlib.contextmanager
def bf16_matmul_precision() -> Iterator[None]:
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@pytest.mark.parametrize(
    "changed",
    [
        internals.other("versions"),
        internals.other("sources"),
        internals.other("kernels"),
        lambda: torch._functorch.config.patch(functionalize_rng_ops=True),
        bf16_matmul_precision,
    ],
    ids=["version", "source", "processor", "tracer", "precision"],
)
def test_key_depends_on_versions_and_settings(plain: str, changed: Callable[[], contextlib.AbstractContextManager[Any]]) -> None:
    graph = captured(scaled, torch.ones(3, 4))
    facts = (Options.parse(None, None).facts,)
    assert key_of(*graph, facts) == plain
    with changed():
        assert key_of(*graph, facts) not in (plain, None)
    assert key_of(*graph, facts) == plain


@pytest.mark.parametrize("kernel", ["aten/sin/AutogradCPU", "aten/sin.out/CPU"])
def test_no_key_with_python_kernels_of_other_libraries(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = captured(scaled, torch.ones(3, 4))
    kernels = [*private.implemented_in_python(), "aten/sin/MPS", "aten/sin/SparseCsrCUDA", "aten/sin/Meta", "mine/sin/CPU"]
    internals.python_kernels(monkeypatch, lambda: kernels)
    assert key_of(*graph, ()) is not None
    kernels.append(kernel)
    assert key_of(*graph, ()) is None


class Holder:
    """Not a module, so its tensors are ordinary inputs."""


class Module(Holder, torch.nn.Module):
    pass


def test_key_distinguishes_buffers_from_other_tensors() -> None:
    """The graphs have the same text, but only buffers are assumed to share no memory."""

    def read(holder: Any) -> torch.Tensor:
        return holder.rows + 1

    texts = []
    for holder in (Holder(), Module()):
        holder.rows = torch.nn.Buffer(torch.ones(3)) if isinstance(holder, Module) else torch.ones(3)
        texts.append(captured_text(*captured(read, holder)))
    assert texts[0] != texts[1]
    assert None not in texts


def test_no_key_with_monkeypatched_torch_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the names of torch's functions, and TorchDynamo may put them into a graph."""
    functional = torch.nn.functional

    @functools.wraps(functional.silu)
    def silu(x: torch.Tensor) -> torch.Tensor:
        return x * 7

    def text(op: str, target: Any) -> str | None:
        graph = Graph()
        graph.output(graph.create_node(op, target, (graph.placeholder("x"),)))
        return captured_text(GraphModule({}, graph), [torch.ones(3)])

    assert None not in (text("call_function", functional.silu), text("call_method", "relu"))
    monkeypatch.setattr(functional, "silu", silu)
    monkeypatch.setattr(torch.Tensor, "relu", silu)
    assert text("call_function", functional.silu) is None
    assert text("call_method", "relu") is None


def test_key_depends_on_torch_modes(plain: str) -> None:
    graph = captured(scaled, torch.ones(3, 4))
    facts = (Options.parse(None, None).facts,)
    keys = {plain}
    for mode in (
        torch.no_grad(),
        torch.inference_mode(),
        torch.autocast("cpu"),
        torch.autocast("cpu", torch.float16),
        torch.device("meta"),
    ):
        with mode:
            keys.add(str(key_of(*graph, facts)))
    torch.use_deterministic_algorithms(True)
    try:
        keys.add(str(key_of(*graph, facts)))
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(keys) == 7
    assert "None" not in keys


def test_graphs_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 4)
    assert key(lambda x: torch.ops.dynaxla_kept_test.twice(x), x) is None, "an op of another library"
    assert key(lambda x, y: x + y, x[:2], x[2:]) is None, "inputs that share a storage"
    assert key(lambda x, n: x * n, x, torch.ones(2, 2)[0, 0].item() + 1) is not None
    torch._dynamo.reset()
    dynamic = torch.ones(5, 4)
    torch._dynamo.mark_dynamic(dynamic, 0)
    assert key(scaled, dynamic) is None, "dynamic sizes"
    assert key(lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)), x) is None, "graphs within the graph"
    internals.lowerings_of_users(monkeypatch)
    assert key() is None, "a lowering of the user"


def test_external_lowerings_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.own_names_of_registry(monkeypatch)
    before = registry.external_lowerings()
    assert before is not None
    registry.register_name("dynaxla_kept_test::twice", lambda x: x)
    assert registry.external_lowerings() is None


def cached_graph(function: Callable[..., Any], *inputs: Any) -> CachedGraph | None:
    return CachedGraph.of(AtenGraph("graph", make_fx(function, tracing_mode="fake")(*inputs)), ())


@pytest.mark.parametrize(
    "function",
    [
        lambda x: [x.clamp(float("-inf"), 0.1), x.masked_fill(x > 0, float("nan")), x + 1e-300],
        lambda x: [x.view(2, 6)[1:, ::2], x.t(), x.to(torch.bfloat16), torch.zeros(2, dtype=torch.complex64) * (1 + 2j)],
        lambda x: [x.contiguous(memory_format=torch.contiguous_format), None, *x.max(0), torch.empty(3, device="cpu").fill_(1)],
        lambda x: [x[torch.arange(2)[None], :], torch.nn.functional.dropout(x, 0.5)],
        lambda x: [x[torch.tensor([2, 0])] * torch.tensor([[1.5], [-0.0]]), x * torch.tensor(float("nan"), dtype=torch.bfloat16)],
    ],
)
def test_graph_read_from_text_equals_the_original(function: Callable[..., Any]) -> None:
    x = torch.randn(3, 4)
    module = make_fx(function, tracing_mode="fake")(x)
    cached = CachedGraph.of(AtenGraph("graph", module, (0,)), ())
    assert cached is not None
    restored = CachedGraph.read(cached.text())
    assert restored == cached
    assert restored.static == (0,)
    assert graph_text(restored.module()) == graph_text(module)
    torch.manual_seed(1)
    expected = module(x)
    torch.manual_seed(1)
    torch.testing.assert_close(restored.module()(x), expected, equal_nan=True)


def test_graphs_that_cannot_be_restored_are_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3)
    constant, large = torch.ones(3), torch.ones(1 << 15)
    assert cached_graph(lambda x: [x + 1], x) is not None
    assert cached_graph(lambda x: [torch.ops.dynaxla_kept_test.twice(x).conj()], x.to(torch.complex64)) is None, "conjugate bits"
    assert CachedGraph.of(AtenGraph("graph", make_fx(lambda x: [x + constant])(x)), ()) is not None
    assert CachedGraph.of(AtenGraph("graph", make_fx(lambda x: [x.sum() + large])(x)), ()) is None, "a large constant"
    assert CachedGraph.of(AtenGraph("graph", make_fx(lambda x: [x + constant[:1]])(x)), ()) is not None
    assert CachedGraph.of(AtenGraph("graph", make_fx(lambda x: [x + 1])(x), phase="forward"), ()) is None, "a graph with a backward pass"
    internals.wrong_decoder_of_floats(monkeypatch)
    assert cached_graph(lambda x: [x + 1.5], x) is None, "a number that is restored wrongly"


class Counter(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("rows", torch.zeros(64, 512))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.count.add_(1)
        self.rows.index_copy_(0, torch.tensor([3]), x.sum() + torch.zeros(1, 512))
        return self.linear(x).relu() * self.count, self.rows.sum()


@pytest.fixture
def compile_as_new_process(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Returns a function that compiles a module as a new process with the same cache directory would."""

    def compile_module(module: Any) -> Any:
        torch._dynamo.reset()
        metrics.reset()
        return torch.compile(module, backend="dynaxla", options={"cache": str(tmp_path)})

    yield compile_module
    metrics.reset()


def test_second_start_uses_the_cached_graph(compile_as_new_process: Callable[..., Any]) -> None:
    """Results and writes to buffers are those of eager mode, also in a second call."""
    results = []
    for cached_graphs in (0, 1):
        torch.manual_seed(0)
        module, x = Counter().requires_grad_(False), torch.randn(2, 4)
        compiled = compile_as_new_process(module)
        results.append([*compiled(x), *compiled(x), module.count, module.rows])
        assert metrics.snapshot().get("graphs_from_cache", 0) == cached_graphs
    torch.manual_seed(0)
    module, x = Counter().requires_grad_(False), torch.randn(2, 4)
    expected = [*module(x), *module(x), module.count, module.rows]
    for result in results:
        torch.testing.assert_close(result, expected)


def test_cached_graph_is_not_used_for_training(compile_as_new_process: Callable[..., Any]) -> None:
    """The second start uses the cached graph without gradients, and traces a new one with gradients."""
    linear, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
    for _ in range(2):
        compiled = compile_as_new_process(linear)
        with torch.no_grad():
            compiled(x)
    assert metrics.snapshot().get("graphs_from_cache") == 1
    compiled(x).sum().backward()
    assert linear.weight.grad is not None
    assert metrics.snapshot().get("graphs_from_cache") == 1


def test_error_of_a_cached_graph_names_the_same_line(compile_as_new_process: Callable[..., Any]) -> None:
    """A function whose line has moved has another key."""
    x, index = torch.ones(3), torch.tensor([7])
    messages = []
    for _ in range(2):
        with pytest.raises(IndexError) as raised:
            compile_as_new_process(lambda x, index: x[index] + 1)(x, index)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]
    lines = ["def f(x):\n return x.sin()", "\n\ndef f(x):\n return x.sin()"]
    keys = []
    for code in lines:
        names: dict[str, Any] = {}
        exec(compile(code, "model.py", "exec"), names)
        keys.append(key(names["f"]))
    assert keys[0] != keys[1]


def test_process_with_all_programs_cached_imports_no_lowerings(tmp_path: Path) -> None:
    """Without the records, lowerings are imported. With two graphs, the test checks that imports do not change the second key."""
    script = """
import sys, torch
from dynaxla.observe import metrics
def function(x):
    y = torch.tanh(x @ x) + 1
    torch._dynamo.graph_break()
    return y.sin().sum(0)
x = torch.arange(16.0).reshape(4, 4) / 16
found = torch.compile(function, backend="dynaxla", options={"cache": sys.argv[1]})(x)
torch.testing.assert_close(found, function(x))
counts = metrics.snapshot()
print(counts.get("graphs_from_cache", 0), counts.get("recalls", 0), "dynaxla.lowering.ops.elementwise" in sys.modules)
"""
    outputs = [run_script(script, [str(tmp_path)]).split() for _ in range(2)]
    for record in (tmp_path / "records").iterdir():
        record.unlink()
    outputs.append(run_script(script, [str(tmp_path)]).split())
    assert outputs == [["0", "0", "True"], ["2", "2", "False"], ["2", "0", "True"]]
