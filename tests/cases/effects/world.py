"""The objects that a training step uses, and the cases by name. Each case is made twice, for eager mode and for compile_step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Step = Callable[[torch.Tensor, torch.Tensor], Any]


@dataclass
class World:
    """The objects that a step uses.

    Attributes:
        log: Values that the step notes.
        more: Other state, compared by its state_dict or value.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    log: list[Any] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


def net(dropout: float = 0.0) -> nn.Module:
    # No bias before the batch norm: its gradient would be only rounding error.
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 4))


def world(make: Callable[[Any], torch.optim.Optimizer] | None = None, dropout: float = 0.0) -> World:
    torch.manual_seed(0)
    model = net(dropout)
    return World(model, (make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)))(model.parameters()))


def loss_of(here: World, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(here.model(x), y)


def train(here: World, loss: torch.Tensor) -> None:
    loss.backward()
    here.optimizer.step()
    here.optimizer.zero_grad()


CASES: dict[str, Callable[[], tuple[World, Step]]] = {}


def case(function: Callable[[], tuple[World, Step]]) -> Callable[[], tuple[World, Step]]:
    """Adds the decorated function to the cases."""
    CASES[function.__name__] = function
    return function


def plain(here: World) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y)
        train(here, loss)
        return loss

    return step
