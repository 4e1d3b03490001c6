"""Tests of dynamic sizes: one Dynamo graph, an executable for each size, a bounded cache."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from dynaxla.observe import metrics
from support.comparisons.compare import assert_equal
from support.processes.scripts import completed


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()


def dynamo_graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_second_batch_size_gives_a_dynamic_graph(net: nn.Module) -> None:
    torch._dynamo.utils.counters.clear()
    metrics.reset()
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True)
    with torch.no_grad():
        for size in (8, 5, 7, 8, 5):
            x = torch.randn(size, 16)
            assert_equal(compiled(x), net(x))
    assert dynamo_graphs() == 2, "a graph of the first size, then one dynamic graph"
    counts = metrics.snapshot()
    assert counts["compile"] == 4, "size 8 of the first graph; sizes 5, 7 and 8 of the dynamic graph"


def test_ten_batch_sizes_need_ten_executables(net: nn.Module) -> None:
    torch._dynamo.utils.counters.clear()
    metrics.reset()
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True, dynamic=True, options={"sizes": "exact"})
    sizes = list(range(2, 12)) * 3
    random.Random(0).shuffle(sizes)
    with torch.no_grad():
        for size in sizes:
            x = torch.randn(size, 16)
            assert_equal(compiled(x), net(x))
    assert dynamo_graphs() == 1
    assert metrics.snapshot()["compile"] == 10
    assert metrics.snapshot()["graphs"] == 1


def test_evicted_executables_are_compiled_again(net: nn.Module) -> None:
    metrics.reset()
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True, dynamic=True, options={"executables": 2, "sizes": "exact"})
    with torch.no_grad():
        for size in (2, 3, 4, 2, 3, 4):
            x = torch.randn(size, 16)
            assert_equal(compiled(x), net(x))
    counts = metrics.snapshot()
    assert counts["compile"] == 6
    assert counts["evictions"] == 4


LOADER = """
import warnings
warnings.simplefilter("error", RuntimeWarning)
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from dynaxla.observe import metrics

data = TensorDataset(torch.randn(22, 16))
for workers in (0, 2):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    metrics.reset()
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    compiled = torch.compile(net, backend="dynaxla", fullgraph=True)
    with torch.no_grad():
        for _ in range(2):
            for (batch,) in DataLoader(data, batch_size=8, num_workers=workers):
                torch.testing.assert_close(compiled(batch), net(batch))
    print(torch._dynamo.utils.counters["stats"]["unique_graphs"], metrics.snapshot()["compile"])
"""


def test_data_loader_with_a_short_last_batch() -> None:
    """Without and with worker processes.

    The test has its own process, because JAX warns at each fork after its clients have started; dynaxla never starts them.
    """
    result = completed(LOADER)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["2 3"] * 2, "Dynamo graphs; executables for size 8, and for 6 and 8 of the dynamic graph"
    # If triton is installed, torch 2.15 starts it, and its library reports leaked nanobind types at exit.
    assert [line for line in result.stderr.splitlines() if "nanobind" not in line and not line.startswith(" - ")] == []


@pytest.mark.quick
def test_views_and_strides_of_dynamic_inputs() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y.t(), y.reshape(-1), y[:, : x.shape[1] // 2], y.expand(2, *y.shape), x.new_zeros(x.shape[0] + 1)

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, dynamic=True)
    for rows, columns in ((3, 4), (5, 6), (4, 3), (7, 2)):
        x = torch.randn(rows, columns)
        assert_equal(compiled(x), function(x))
        assert_equal(compiled(x.t()), function(x.t()))


def test_changing_python_numbers_give_few_graphs() -> None:
    def function(x: torch.Tensor, scale: float, count: int) -> tuple[torch.Tensor, int]:
        return x * scale + count, count * 2

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    x = torch.randn(4)
    for index in range(5):
        assert_equal(compiled(x, 1.5 + index, 3 + index), function(x, 1.5 + index, 3 + index))
    assert dynamo_graphs() <= 3


@pytest.mark.quick
def test_strides_that_change_under_one_dynamic_graph() -> None:
    compiled = torch.compile(lambda x: x + 1, backend="dynaxla", fullgraph=True, dynamic=True)
    base = torch.randn(6, 8, 10)
    for x in (base, base[:, :, :5], base.permute(2, 0, 1), base[::2], base[:, 1:, 3:], base.transpose(0, 1)[:4]):
        assert_equal(compiled(x), x + 1)


@pytest.mark.quick
def test_backward_pass_with_dynamic_sizes() -> None:
    torch._dynamo.utils.counters.clear()
    layer = nn.Linear(8, 4)
    compiled = torch.compile(layer, backend="dynaxla", fullgraph=True, dynamic=True)
    for size in (3, 5, 4, 3):
        gradients = []
        x = torch.randn(size, 8)
        for callee in (compiled, layer):
            layer.zero_grad()
            callee(x).square().sum().backward()
            gradients.append([parameter.grad.clone() for parameter in layer.parameters()])
        assert_equal(gradients[0], gradients[1])
    assert dynamo_graphs() == 1
