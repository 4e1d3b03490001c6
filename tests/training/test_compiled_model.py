"""Ordinary training loops around `torch.compile(model, backend="dynaxla")`, compared with the same loops in eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from support.comparisons.compare import assert_equal


class Net(nn.Module):
    """A convolution, a batch norm, and a linear layer whose weights are used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.convolution(x)).relu().mean((2, 3))
        return self.tied(self.linear(x).tanh())


Loop = Callable[[nn.Module, Callable[[torch.Tensor], torch.Tensor]], list[float]]


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 5, 5, generator=generator) for _ in range(count)]


def plain(net: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    losses = []
    for x in batches(3):
        optimizer.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        losses.append(loss.item())
    return losses


def accumulated(net: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    losses = []
    for x in batches(3):
        loss = call(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
        losses.append(loss.item())
    return losses


def hooked(net: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    # A compiled model computes all gradients at once, so parameters get them in another order than in eager mode.
    weights: list[float] = []
    biases: list[float] = []
    net.get_parameter("linear.weight").register_hook(lambda gradient: weights.append(gradient.sum().item()) or gradient * 2)
    net.get_parameter("norm.bias").register_post_accumulate_grad_hook(lambda parameter: biases.append(parameter.grad.sum().item()))
    y = call(batches(1)[0])
    y.register_hook(lambda gradient: gradient + 1)
    y.square().mean().backward()
    return weights + biases


def frozen(net: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    net.get_parameter("convolution.weight").requires_grad_(False)
    losses = plain(net, call)
    net.get_parameter("convolution.weight").requires_grad_(True)
    net.get_parameter("linear.weight").requires_grad_(False)
    return losses + plain(net, call)


def switched(net: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    losses = plain(net, call)
    net.eval()
    with torch.no_grad():
        losses.append(call(batches(1)[0]).sum().item())
    net.train()
    return losses + plain(net, call)


def autocast(net: nn.Module, call: Callable[[torch.Tensor], torch.Tensor]) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    losses = []
    for number, x in enumerate(batches(4)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = call(x).float().square().mean() * (float("inf") if number == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses += [loss.item(), scaler.get_scale()]
    assert losses[-1] == 128.0, "the infinite loss has halved the scale, and its step was skipped"
    return losses


LOOPS: dict[str, Loop] = {
    "plain": plain,
    "accumulated": accumulated,
    "hooked": hooked,
    "frozen": frozen,
    "switched": switched,
    "autocast": autocast,
}


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("name", LOOPS)
def test_loops_equal_eager_mode(name: str) -> None:
    theirs = Net()
    mine, other_backends = copy.deepcopy(theirs), copy.deepcopy(theirs)
    expected = LOOPS[name](theirs, theirs)
    if name == "frozen" and torch.__version__ < (2, 13):
        losses = LOOPS[name](other_backends, torch.compile(other_backends, backend="aot_eager", fullgraph=True))
        if losses != pytest.approx(expected, rel=1e-4, abs=1e-5):
            pytest.skip("this TorchDynamo, with the backend aot_eager too, does not see that a parameter requires gradients again")
    losses = LOOPS[name](mine, torch.compile(mine, backend="dynaxla", fullgraph=True))
    # bfloat16 has a precision of eight bits, and a compiled graph rounds fewer intermediate values.
    rtol, atol = (0.05, 0.02) if name == "autocast" else (1e-3, 1e-5)
    assert losses == pytest.approx(expected, rel=rtol / 10 if name != "autocast" else rtol, abs=1e-5)
    for (key, parameter), other in zip(mine.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=rtol, atol=atol, msg=lambda text, key=key: f"{key}: {text}")
        assert (parameter.grad is None) == (other.grad is None)
        if parameter.grad is not None and other.grad is not None:
            assert (parameter.grad.dtype, parameter.grad.stride()) == (other.grad.dtype, other.grad.stride())
            scale = float(other.grad.abs().max())
            torch.testing.assert_close(
                parameter.grad / scale, other.grad / scale, rtol=rtol, atol=max(atol, 1e-4), msg=lambda text, key=key: f"{key}.grad: {text}"
            )
    for mine_buffer, buffer in zip(mine.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(mine_buffer, buffer, rtol=rtol, atol=atol)


def test_checkpoint() -> None:
    layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def function(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = checkpoint(lambda x, layer=layer: F.dropout(layer(x), 0.0).tanh(), x, use_reentrant=False)
        return x

    x = torch.randn(3, 4)
    gradients = []
    for call in (function, torch.compile(function, backend="dynaxla", fullgraph=True)):
        layers.zero_grad()
        call(x).square().sum().backward()
        gradients.append([parameter.grad for parameter in layers.parameters()])
    for mine, theirs in zip(gradients[1], gradients[0], strict=True):
        assert_equal(mine, theirs)


def test_dropout_has_one_mask_for_forward_and_backward() -> None:
    compiled = torch.compile(lambda x: F.dropout(x, 0.5), backend="dynaxla", fullgraph=True)
    x = torch.ones(64, requires_grad=True)
    torch.manual_seed(3)
    first = compiled(x)
    first.sum().backward()
    assert torch.equal(x.grad, first.detach())
    assert 0 < int((first > 0).sum()) < 64
    torch.manual_seed(3)
    assert torch.equal(compiled(x), first), "the same seed draws the same mask"
    assert not torch.equal(compiled(x), first)


def test_double_backward_is_refused() -> None:
    compiled = torch.compile(nn.Linear(3, 2), backend="dynaxla")
    x = torch.randn(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(compiled(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()
