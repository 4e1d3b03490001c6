"""Tests of passes/aten/weight_packing.py: frozen weights in the memory order of oneDNN's kernels give eager mode's results."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dynaxla.errors import LoweringError
from dynaxla.lowering.cpu import onednn_support, weight_orders
from support import internals
from support.comparisons.compare import assert_equal
from support.comparisons.single_op import run_op
from support.forced_implementations import backend_with

pytestmark = pytest.mark.skipif(
    not onednn_support.supports_packed() or not hasattr(os, "sched_getaffinity"),
    reason="weights are packed only on Linux, for the jaxlib versions that were tested",
)

TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.bfloat16: (3e-2, 3e-2)}


def frozen(net: Callable[..., Any], dump: Path, implementations: Mapping[str, str] | None = None, **options: Any) -> Callable[..., Any]:
    return torch.compile(
        net,
        backend=backend_with(implementations or {}),
        fullgraph=True,
        options={"freeze": True, "fallback": "error", "dump": dump, **options},
    )


def count_packed(dump: Path) -> int:
    """Returns the number of products and convolutions with packed weights in the dumped graphs.

    Their ops are dynaxla.packed_linear and dynaxla.packed_convolution; dynaxla.pack packs the weight.
    """
    return sum(file.read_text().count(f"dynaxla.packed_{op}") for file in dump.glob("*.aten.txt") for op in ("linear", "convolution"))


def assert_packed(dump: Path, graphs: int = 1) -> None:
    """Asserts that one product or convolution of each graph reads packed weights."""
    assert_count(count_packed(dump), graphs)


def assert_count(count: int, wanted: int) -> None:
    if not count and "AVX512" not in torch.backends.cpu.get_cpu_capability():
        pytest.skip("oneDNN's order is unknown on this processor, so weights are not packed")
    assert count == wanted


@pytest.mark.sample(usual=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("rows", "inputs", "columns"), [(2, 512, 512), (9, 131, 259), (128, 768, 1000), (1, 4096, 1031), (300, 64, 257)])
def test_linear(rows: int, inputs: int, columns: int, bias: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Linear(inputs, columns, bias, dtype=dtype).requires_grad_(False)
    x = torch.randn(rows, inputs, dtype=dtype)
    assert_equal(frozen(net, tmp_path)(x), net(x), tolerance=TOLERANCE[dtype])
    assert_packed(tmp_path)


@pytest.mark.sample(usual=5)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("inputs", "outputs", "kernel", "settings"),
    [
        (64, 64, 3, {"padding": 1}),
        (37, 70, 3, {"stride": 2, "padding": (1, 2)}),
        (40, 100, (5, 1), {"padding": "same", "dilation": 2}),
        (130, 514, 1, {}),
        (256, 64, 1, {"stride": 2, "bias": False}),
        (512, 512, 3, {"padding": 1, "bias": False}),
    ],
)
def test_convolution(inputs: int, outputs: int, kernel: Any, settings: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Conv2d(inputs, outputs, kernel, **settings, dtype=dtype).requires_grad_(False)
    x = torch.randn(2, inputs, 7, 9, dtype=dtype)
    compiled = frozen(net, tmp_path)
    assert_equal(compiled(x), net(x), tolerance=TOLERANCE[dtype])
    channels_last = x.to(memory_format=torch.channels_last)
    assert_equal(compiled(channels_last), net(channels_last), tolerance=TOLERANCE[dtype])
    assert_packed(tmp_path, graphs=2)


class Block(nn.Module):
    """A weight that is read twice, a weight with inputs as first dimension, and activations after them."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = nn.Linear(160, 160)
        self.plain = nn.Parameter(torch.randn(160, 320) / 16)
        self.shift = nn.Parameter(torch.randn(320))
        self.last = nn.Linear(320, 192)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.tied(x))
        x = F.gelu(self.tied(x), approximate="tanh")
        return torch.sigmoid(self.last(torch.tanh(torch.addmm(self.shift, x.flatten(0, 1), self.plain)))).unflatten(0, x.shape[:2])


def test_changed_weights_are_packed_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Block().requires_grad_(False)
    compiled = frozen(net, tmp_path)
    x = torch.randn(3, 17, 160)
    assert_equal(compiled(x), net(x), tolerance=TOLERANCE[torch.float32])
    count = count_packed(tmp_path)
    for change in (
        lambda: net.tied.weight.mul_(-1),
        lambda: net.plain.copy_(net.plain.flip(0)),
        lambda: net.load_state_dict(Block().state_dict()),
    ):
        change()
        assert_equal(compiled(x), net(x), tolerance=TOLERANCE[torch.float32])
    assert_count(count, 4)


def test_threads_on_fewer_processors(tmp_path: Path) -> None:
    """oneDNN may choose another order on fewer processors, so a thread there does not use packed weights."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).requires_grad_(False)
    x = torch.randn(4, 256)
    compiled = frozen(net, tmp_path)
    expected = compiled(x)
    allowed = os.sched_getaffinity(0)
    results: list[Any] = []

    def work(processors: set[int]) -> None:
        os.sched_setaffinity(0, processors)
        results.append((weight_orders.are_orders_valid(), compiled(x)))

    wanted = [(allowed, True), ({min(allowed)}, len(allowed) == 1)]
    for processors, _ in wanted:
        thread = threading.Thread(target=work, args=(processors,))
        thread.start()
        thread.join()
        while Path(f"/proc/self/task/{thread.native_id}").exists():  # join returns before the system has ended the thread
            time.sleep(0.001)
    assert [is_valid for is_valid, _ in results] == [is_valid for _, is_valid in wanted]
    for _, result in results:
        assert_equal(result, expected, tolerance=TOLERANCE[torch.float32])


def test_unknown_orders_are_not_packed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Weights are not packed if oneDNN's order has changed, or is unknown."""
    torch.manual_seed(0)
    net = nn.Linear(256, 200).requires_grad_(False)
    x = torch.randn(4, 256)
    compiled = frozen(net, tmp_path)
    compiled(x)
    assert_packed(tmp_path)
    internals.valid_packing(monkeypatch, lambda: False)
    assert_equal(compiled(x), net(x), tolerance=TOLERANCE[torch.float32])
    assert count_packed(tmp_path) == 0, "the graph with plain weights replaces the dumped graph"
    monkeypatch.undo()
    internals.packings(monkeypatch, [weight_orders.Packing((0, 1), (1,), (40,))])
    other = nn.Linear(256, 201).requires_grad_(False)
    torch._dynamo.reset()
    assert_equal(frozen(other, tmp_path / "other")(x), other(x), tolerance=TOLERANCE[torch.float32])
    assert count_packed(tmp_path / "other") == 0


@pytest.mark.parametrize("version", ["0.10.1", "0.10.3", "0.11.0", "0.10.2.dev20260101"])
def test_other_jaxlib_versions_do_not_pack(version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    internals.jaxlib_release(monkeypatch, version)
    net = nn.Linear(256, 256).requires_grad_(False)
    x = torch.randn(4, 256)
    torch._dynamo.reset()
    assert_equal(frozen(net, tmp_path)(x), net(x), tolerance=TOLERANCE[torch.float32])
    assert count_packed(tmp_path) == 0
    with pytest.raises(LoweringError, match="another version of jaxlib"):
        run_packed(256 * 256 + weight_orders.SLACK)


def run_packed(length: int) -> torch.Tensor:
    expected = torch.empty(4, 256)
    return run_op(weight_orders.packed_linear, torch.randn(4, 256), torch.zeros(length), None, 256, expected=expected)


def test_too_short_weight_raises() -> None:
    """oneDNN would read past the weight's end."""
    with pytest.raises(LoweringError, match="too short"):
        run_packed(256 * 256 + weight_orders.SLACK - 1)
    assert run_packed(256 * 256 + weight_orders.SLACK).eq(0).all()


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (nn.Linear(256, 256), torch.randn(2000, 256)),
        (nn.Linear(32, 32), torch.randn(2, 32)),
        (nn.Conv2d(64, 64, 3, groups=2), torch.randn(2, 64, 5, 5)),
        (nn.Linear(256, 256, dtype=torch.float64), torch.randn(2, 256, dtype=torch.float64)),
    ],
    ids=["many rows", "small", "groups", "float64"],
)
def test_unsupported_weights_are_not_packed(net: nn.Module, x: torch.Tensor, tmp_path: Path) -> None:
    net.requires_grad_(False)
    assert_equal(frozen(net, tmp_path)(x), net(x), tolerance=TOLERANCE[torch.float32])
    assert count_packed(tmp_path) == 0


def test_chosen_implementation_prevents_packing(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(64 * 9, 256)).requires_grad_(False)
    x = torch.randn(2, 64, 5, 5)
    assert_equal(
        frozen(net, tmp_path, implementations={"convolution": "xla", "contraction": "xla"})(x), net(x), tolerance=TOLERANCE[torch.float32]
    )
    assert count_packed(tmp_path) == 0
