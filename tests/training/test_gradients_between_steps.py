"""Gradients and optimizer state that are replaced, moved or shared between the calls of a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import dynaxla

Change = Callable[[nn.Parameter, nn.Parameter, torch.optim.Optimizer], None]


def moved(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Moves a tensor into the other one's memory."""
    tensor.set_(other.untyped_storage(), other.storage_offset(), other.shape, other.stride())


def replace(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    one.grad = torch.full_like(one, 0.5)


def share_a_buffer(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    buffer = torch.zeros(2 * one.numel())
    one.grad, other.grad = buffer[: one.numel()].view_as(one), buffer[one.numel() :].view_as(other)


def have_one_gradient(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    one.grad = other.grad


def exchange(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    one.grad, other.grad = other.grad, one.grad


def lie_in_the_others_memory(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    assert one.grad is not None
    assert other.grad is not None
    moved(one.grad, other.grad)


def lie_in_the_states_memory(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    assert one.grad is not None
    moved(one.grad, optimizer.state[one]["exp_avg"])


def lie_elsewhere(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    assert one.grad is not None
    moved(one.grad, torch.full_like(one, 0.25))
    one.data = one.data.clone()
    optimizer.state[other]["exp_avg"].data = optimizer.state[other]["exp_avg"].data.clone()


def vanish(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    one.grad = None


CHANGES: list[Change] = [
    *(replace, share_a_buffer, have_one_gradient, exchange, lie_in_the_others_memory, lie_in_the_states_memory, lie_elsewhere, vanish),
]


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("keeps", [False, True], ids=["zeroed", "summed"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_as_in_eager_mode(change: Change, keeps: bool) -> None:
    """The change is made twice in turn and once more, so that notes about earlier gradients cannot stand for later ones."""
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        step = training(net, optimizer, keeps)
        step = dynaxla.compile_step(step) if compiled else step
        results: list[torch.Tensor] = []
        for turn in range(7):
            torch.manual_seed(turn)
            results.append(step(torch.randn(3, 4), torch.randn(3, 4)).clone())
            if turn in (1, 2, 4):
                with torch.no_grad():
                    change(net[0].weight, net[2].weight, optimizer)
            results += [parameter.detach().clone() for parameter in net.parameters()]
            results += [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]
        found.append(results)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def training(net: nn.Module, optimizer: torch.optim.Optimizer, keeps: bool) -> Callable[..., torch.Tensor]:
    """Returns a step. keeps: it adds to the gradients that it finds."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not keeps:
            optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
