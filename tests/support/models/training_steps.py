"""A small network, optimizers, and a training step, for tests of compile_step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dynaxla.observe import metrics

Step = Callable[..., Any]
Make = Callable[[nn.Module], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    "SGD momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD foreach": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=0.01),
    "Adam amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    "AdamW foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True),
    "AdamW fused": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, fused=True),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters(), lr=0.01),
    "RAdam": lambda model: torch.optim.RAdam(model.parameters(), lr=0.01),
    "Adamax": lambda model: torch.optim.Adamax(model.parameters(), lr=0.01),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.01, lr_decay=0.1),
    "Adadelta": lambda model: torch.optim.Adadelta(model.parameters(), lr=0.5),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=0.01),
    "ASGD": lambda model: torch.optim.ASGD(model.parameters(), lr=0.01),
    "Muon": lambda model: torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01),
}


class Net(nn.Module):
    """A network with tied weights, a batch norm and a frozen layer.

    The layer before the batch norm has no bias, because its gradient would be only rounding errors.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.second = nn.Linear(8, 8)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.second.weight
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        return self.tied(torch.tanh(self.second(self.frozen(x)))) * self.scale


def batches(count: int, size: int = 5) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(size, 6, generator=generator), torch.randn(size, 8, generator=generator)) for _ in range(count)]


def two(make: Make, model: Callable[[], nn.Module] = Net) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    one = model()
    other = copy.deepcopy(one)
    return one, make(one), other, make(other)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def assert_same(
    expected: nn.Module, actual: nn.Module, ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, tolerance: float = 1e-4
) -> None:
    rtol, atol = 2 * tolerance, tolerance / 5
    torch.testing.assert_close(dict(actual.state_dict()), dict(expected.state_dict()), rtol=rtol, atol=atol)
    one, other = ours.state_dict(), theirs.state_dict()
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for index, state in other["state"].items():
        assert one["state"][index].keys() == state.keys()
        for name, value in state.items():
            torch.testing.assert_close(torch.as_tensor(one["state"][index][name]), torch.as_tensor(value), rtol=rtol, atol=atol)
    for parameter, mine in zip(expected.parameters(), actual.parameters(), strict=True):
        assert (parameter.grad is None) == (mine.grad is None)
        if parameter.grad is not None:
            torch.testing.assert_close(mine.grad, parameter.grad, rtol=rtol, atol=atol)
            assert mine.grad.stride() == parameter.grad.stride()


def graphs() -> tuple[int, int]:
    snapshot = metrics.snapshot()
    return snapshot.get("graphs", 0), snapshot.get("compile", 0)
