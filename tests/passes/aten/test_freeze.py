"""Tests of passes/aten/freeze.py (option freeze): values that depend only on parameters are computed once, and again after a change."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.engine.frozen_values import _CachedResults
from dynaxla.errors import OptionError
from dynaxla.observe import metrics
from dynaxla.passes.aten.freeze import freeze


class Net(nn.Module):
    """Three batch norms that fold into the convolution before them, and one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.grouped = nn.Conv2d(8, 12, 3, groups=4, stride=2)
        self.second_norm = nn.BatchNorm2d(12, affine=False)
        self.up = nn.ConvTranspose2d(12, 8, 3, groups=2, stride=2)
        self.third_norm = nn.BatchNorm2d(8)
        self.lone_norm = nn.BatchNorm2d(8)
        self.linear = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        x = self.second_norm(self.grouped(x)).relu()
        x = self.lone_norm(self.third_norm(self.up(x)).sigmoid())
        return self.linear(x.mean((2, 3)))


def trained(net: nn.Module, x: torch.Tensor) -> nn.Module:
    """Returns the network for inference, with statistics and affine parameters that are not the initial ones."""
    net.train()
    for _ in range(3):
        net(x)
    with torch.no_grad():
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d) and module.affine:
                module.weight.uniform_(0.5, 2)
                module.bias.normal_()
    return net.eval().requires_grad_(False)


def frozen(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(function, backend="dynaxla", fullgraph=True, options={"freeze": True, **options})


def refers_to(prepared: _CachedResults, parameter: torch.Tensor) -> bool:
    return any(reference() is parameter for reference in prepared._references)


def preparations() -> int:
    return metrics.snapshot().get("preparations", 0)


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_batch_norms_are_folded(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.randn(4, 3, 9, 10)
    net = trained(Net(), x).to(dtype)
    x = x.to(dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-4, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(frozen(net, dump=str(tmp_path))(x), net(x), rtol=tolerance, atol=tolerance)
    norms = {file.name: file.read_text().count("batch_norm") for file in tmp_path.glob("*.aten.txt")}
    assert sorted(norms) == sorted(file.name for file in tmp_path.glob("*.aten.txt"))
    (rest,) = (count for name, count in norms.items() if "prepared" not in name)
    unfolded = tmp_path / "unfolded"
    torch._dynamo.reset()
    torch.compile(net, backend="dynaxla", options={"dump": str(unfolded)})(x)
    (file,) = unfolded.glob("*.aten.txt")
    assert rest * 4 == file.read_text().count("batch_norm")


CHANGES: dict[str, Callable[[Net], Any]] = {
    "in place": lambda net: net.first.weight.mul_(2),
    "one element": lambda net: net.first.weight[0, 0, 0, 0].fill_(3),
    "data of another tensor": lambda net: setattr(net.first.weight, "data", torch.randn(8, 3, 3, 3)),
    "state dict": lambda net: net.load_state_dict({name: value + 1 for name, value in net.state_dict().items()}),
    "another parameter": lambda net: setattr(net.first, "weight", nn.Parameter(torch.randn(8, 3, 3, 3), requires_grad=False)),
    "a buffer": lambda net: net.norm.running_mean.add_(1),
    "an optimizer": lambda net: _optimize(net),
}


def _optimize(net: Net) -> None:
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    net.zero_grad()


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("change", CHANGES)
def test_changed_parameter_is_noticed(change: str) -> None:
    x = torch.randn(4, 3, 9, 10)
    net = trained(Net(), x)
    compiled = frozen(net)
    with torch.no_grad():
        compiled(x)
        before = preparations()
        for _ in range(3):
            compiled(x)
        assert preparations() == before
        for _ in range(2):
            CHANGES[change](net)
            torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)


def test_memory_of_old_parameter_is_not_reused() -> None:
    """While results of a parameter are cached, its old memory stays allocated: no new parameter has the same address."""
    net = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)).eval().requires_grad_(False)
    compiled = frozen(net)
    x = torch.randn(2, 2, 4)
    for _ in range(20):
        net[0].weight.data = torch.randn(2, 2, 1)
        net[0].weight.data = torch.randn(2, 2, 1)
        torch.testing.assert_close(compiled(x), net(x))


def test_constant_work_is_done_once(tmp_path: Path) -> None:
    table, index = nn.Parameter(torch.randn(10, 4)), torch.tensor([[1, 2], [3, 9]])

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = table
            self.register_buffer("index", index)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.table[self.index].exp().transpose(0, 1)

    net = Biased()
    x = torch.randn(3, 2, 2, 4)
    with torch.no_grad():
        torch.testing.assert_close(frozen(net, dump=str(tmp_path))(x), net(x))
    (rest,) = (file.read_text() for file in tmp_path.glob("*.aten.txt") if "prepared" not in file.name)
    assert "aten.exp" not in rest
    assert "aten.index" not in rest


def test_caller_may_write_to_results() -> None:
    """Later calls never read a result that was returned."""

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            doubled = self.weight * 2
            return x + doubled.exp(), doubled, doubled.t(), self.weight, self.weight[0], (self.weight + 1).unbind()[1]

    net = Returns().requires_grad_(False)
    compiled = frozen(net)
    x = torch.randn(3, 4)
    for _ in range(3):
        for result, expected in zip(compiled(x), net(x), strict=True):
            torch.testing.assert_close(result, expected)
            assert result.stride() == expected.stride()
        results = compiled(x)
        assert results[3] is net.weight
        assert results[4].data_ptr() == net.weight.data_ptr()
        assert results[1].data_ptr() == results[2].data_ptr()
        for result in results[:3]:
            result.fill_(7)


def test_module_that_changes_its_buffer() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count.add_(1)
            return x + self.count.exp()

    net, other = Counts(), Counts()
    compiled = frozen(net)
    x = torch.randn(3)
    for _ in range(4):
        torch.testing.assert_close(compiled(x), other(x))
        torch.testing.assert_close(net.count, other.count)


def test_autocast() -> None:
    """The weights' casts are done once."""
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).requires_grad_(False)
    x = torch.randn(16, 64)
    with torch.autocast("cpu", torch.bfloat16):
        compiled = frozen(net)
        before = preparations()
        for _ in range(3):
            torch.testing.assert_close(compiled(x), net(x), rtol=2e-2, atol=2e-2)
        assert preparations() == before + 1


def test_dynamic_sizes() -> None:
    x = torch.randn(4, 3, 9, 10)
    net = trained(Net(), x)
    compiled = torch.compile(net, backend="dynaxla", dynamic=True, options={"freeze": True})
    for batch in (4, 2, 7):
        x = torch.randn(batch, 3, 9, 10)
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)


def test_data_dependent_sizes() -> None:
    class Selects(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * self.weight.exp())[x > 0] + 1

    net = Selects().requires_grad_(False)
    x = torch.randn(5, 4)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch.testing.assert_close(frozen(net)(x), net(x))


def test_retrace_backend() -> None:
    x = torch.randn(4, 3, 9, 10)
    net = trained(Net(), x)
    compiled = torch.compile(net, backend="dynaxla_retrace", options={"freeze": True})
    for _ in range(2):
        net.first.weight.mul_(1.5)
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)


def test_nothing_to_prepare() -> None:
    torch.testing.assert_close(frozen(lambda x: x + 1)(torch.ones(3)), torch.full((3,), 2.0))
    net = nn.Linear(3, 3).requires_grad_(False)
    torch.testing.assert_close(frozen(net)(torch.ones(2, 3)), net(torch.ones(2, 3)))


def test_inference_tensors() -> None:
    with torch.inference_mode():
        net = nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)).eval()
        x = torch.randn(2, 2, 4)
        torch.testing.assert_close(frozen(net)(x), net(x))


def test_training_raises() -> None:
    with pytest.raises(OptionError, match="inference"):
        frozen(nn.Linear(3, 3))(torch.ones(2, 3))


def test_memory_is_freed() -> None:
    net = trained(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), torch.randn(2, 3, 5, 5))
    compiled = frozen(net)
    compiled(torch.randn(2, 3, 5, 5))
    weight, storage = weakref.ref(net[0].weight), weakref.ref(net[0].weight.untyped_storage())
    (prepared,) = (weakref.ref(item) for item in gc.get_objects() if type(item) is _CachedResults and refers_to(item, net[0].weight))
    del net, compiled
    gc.collect()
    assert weight() is None
    assert storage() is None
    assert prepared() is None


def test_wrong_option() -> None:
    with pytest.raises(OptionError, match="freeze is True or False"):
        torch.compile(torch.exp, backend="dynaxla", options={"freeze": 1})(torch.ones(1))


def test_which_weights_are_copied() -> None:
    """Row-major weights with windows of more than one element, once each: a program may read them in another layout."""

    def function(shared: torch.Tensor, point: torch.Tensor, last: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        x = torch.conv2d(torch.conv2d(x, shared), shared)
        return [torch.conv2d(torch.conv2d(x, point), last), torch.conv2d(x, x[:1])]

    weights = [torch.randn(3, 3, 3, 3), torch.randn(3, 3, 1, 1), torch.randn(3, 3, 3, 3).to(memory_format=torch.channels_last)]
    inputs = [*weights, torch.randn(1, 3, 9, 9)]
    module = make_fx(function, tracing_mode="fake")(*inputs)
    found = freeze(module, [0, 1, 2], copy_weights=True)
    assert found is not None
    assert [node.name for node in found.prepared.inputs] == ["shared_1"]
    assert [node.target for node in found.prepared.module.graph.nodes if node.op == "call_function"] == [torch.ops.aten.clone.default]
    torch.testing.assert_close(list(found.module(*inputs)), function(*inputs))
    assert freeze(module, [0, 1, 2], copy_weights=False) is None
