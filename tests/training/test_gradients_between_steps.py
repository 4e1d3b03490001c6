"""Gradients and optimizer state that are replaced, moved or shared between the calls of a step."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import dynaxla

Change = Callable[[nn.Parameter, nn.Parameter, torch.optim.Optimizer], None]


def move_to_memory_of(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Moves a tensor to another tensor's memory."""
    tensor.set_(other.untyped_storage(), other.storage_offset(), other.shape, other.stride())


def replace_gradient(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    one.grad = torch.full_like(one, 0.5)


def put_gradients_in_one_buffer(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    buffer = torch.zeros(2 * one.numel())
    one.grad, other.grad = buffer[: one.numel()].view_as(one), buffer[one.numel() :].view_as(other)


def share_one_gradient(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    one.grad = other.grad


def swap_gradients(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    one.grad, other.grad = other.grad, one.grad


def use_other_gradients_memory(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    assert one.grad is not None
    assert other.grad is not None
    move_to_memory_of(one.grad, other.grad)


def use_states_memory(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    assert one.grad is not None
    move_to_memory_of(one.grad, optimizer.state[one]["exp_avg"])


def use_new_memory(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    assert one.grad is not None
    move_to_memory_of(one.grad, torch.full_like(one, 0.25))
    one.data = one.data.clone()
    optimizer.state[other]["exp_avg"].data = optimizer.state[other]["exp_avg"].data.clone()


def remove_gradient(one: nn.Parameter, other: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    one.grad = None


CHANGES: list[Change] = [
    *(
        replace_gradient,
        put_gradients_in_one_buffer,
        share_one_gradient,
        swap_gradients,
        use_other_gradients_memory,
        use_states_memory,
        use_new_memory,
        remove_gradient,
    ),
]


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("accumulates", [False, True], ids=["zeroed", "summed"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_as_in_eager_mode(change: Change, accumulates: bool) -> None:
    """Two changes in a row and a later one find outdated notes about gradients."""
    runs = []
    for compiled in (False, True):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        step = make_step(net, optimizer, accumulates)
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
        runs.append(results)
    torch.testing.assert_close(runs[1], runs[0], rtol=1e-4, atol=1e-5)


def make_step(net: nn.Module, optimizer: torch.optim.Optimizer, accumulates: bool) -> Callable[..., torch.Tensor]:
    """Returns a training step. With `accumulates`, it adds to existing gradients."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not accumulates:
            optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
