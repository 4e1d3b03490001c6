"""A forward program saves values for its backward program in the layout in which they were computed. Users do not see this layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from dynaxla.observe import metrics
from support.comparisons.compare import assert_equal

CHANNELS = 8


class Net(nn.Module):
    """All dimensions of its activations have one size, so no shape shows a wrong layout."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.two = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=4)
        self.three = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.norm(self.one(x)).relu()
        y = self.two(features).sigmoid() * features.transpose(1, 3)
        return self.three(y.view(-1, CHANNELS, CHANNELS, CHANNELS)).mean((2, 3)), features


def images(batch: int = CHANNELS, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
    x = torch.randn(batch, CHANNELS, CHANNELS, CHANNELS, generator=torch.Generator().manual_seed(1))
    return x.contiguous(memory_format=memory_format)


def check(net: nn.Module, call: Callable[..., tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor) -> None:
    """Compares a forward and backward pass of `call`, a compiled copy of net, with net's own."""
    (expected, expected_features), expected_x = net(one := x.clone().requires_grad_()), one
    (actual, features), actual_x = call(two := x.clone().requires_grad_()), two
    assert_equal([expected, expected_features], [actual, features])
    assert features.stride() == expected_features.stride()
    (expected.square().sum() + expected_features[..., 0].sum()).backward()
    (actual.square().sum() + features[..., 0].sum()).backward()
    torch.testing.assert_close(actual_x.grad, expected_x.grad, rtol=1e-4, atol=1e-4)
    assert actual_x.grad.stride() == expected_x.grad.stride()


def check_gradients(net: nn.Module, other: nn.Module) -> None:
    for (name, parameter), mine in zip(net.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, parameter.grad, rtol=1e-3, atol=1e-3, msg=lambda text, name=name: f"{name}: {text}")
        strides = zip(mine.grad.stride(), parameter.grad.stride(), parameter.shape, strict=True)
        assert all(one == two for one, two, size in strides if size > 1), name


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=["contiguous", "channels-last"])
@pytest.mark.parametrize("backend", ["dynaxla", "dynaxla_retrace"])
def test_gradients(backend: str, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    net = Net().to(memory_format=memory_format)
    other = copy.deepcopy(net)
    compiled = torch.compile(other, backend=backend)
    for _ in range(2):
        check(net, compiled, images(memory_format=memory_format))
    check_gradients(net, other)


def test_dynamic_sizes() -> None:
    torch.manual_seed(0)
    net = Net()
    other = copy.deepcopy(net)
    compiled = torch.compile(other, backend="dynaxla", dynamic=True)
    for batch in (8, 3, 8):
        check(net, compiled, images(batch))
    check_gradients(net, other)


def test_saved_tensors_in_other_memory() -> None:
    """Hooks get the saved tensors, and may return tensors with other strides."""
    torch.manual_seed(0)
    net = Net()
    other = copy.deepcopy(net)
    compiled = torch.compile(other, backend="dynaxla")
    strides = set()

    def pack(saved: torch.Tensor) -> torch.Tensor:
        if saved.dim() == 4 and saved.shape[-1] == CHANNELS:
            strides.add(saved.stride())
        return saved.clone(memory_format=torch.contiguous_format)

    for hooks in (lambda saved: saved, pack, lambda saved: saved):
        with saved_tensors_hooks(hooks, lambda saved: saved):
            check(net, compiled, images())
    check_gradients(net, other)
    assert (CHANNELS**3, 1, CHANNELS**2, CHANNELS) in strides, f"nothing is saved channels-last: {strides}"


def test_saved_tensors_are_not_copied() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3), nn.BatchNorm2d(CHANNELS), nn.ReLU()) for _ in range(2)))
    compiled = torch.compile(net, backend="dynaxla")
    for number in range(3):
        before = metrics.snapshot().get("input_copies", 0)
        compiled(images()).sum().backward()
        assert metrics.snapshot().get("input_copies", 0) == before, f"call {number}"


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scale: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return (scale * x).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.saved_tensors[0], None


# TorchDynamo creates an instance of the function, and torch warns of it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_saved_tensor_that_becomes_a_gradient() -> None:
    """Users see this saved tensor, so it must have eager mode's strides."""
    torch.manual_seed(0)
    convolution = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1).requires_grad_(False)
    gradients = []
    for wrap in (lambda function: function, torch.compile(backend="dynaxla")):
        scale = torch.ones(CHANNELS, CHANNELS, CHANNELS, CHANNELS, requires_grad=True)
        out = wrap(lambda x, scale: _Scaled.apply(scale, convolution(x)))(images(), scale)
        gradients += torch.autograd.grad(out, scale)
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)
    assert gradients[1].stride() == gradients[0].stride()
