"""Single functions on a transformer's activations: elementwise, and along rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

ROWS, WIDTH, CLASSES, HEADS = 197, 768, 1000, 12


class Function(nn.Module):
    """A function without parameters."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.function(*inputs)


def hidden(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, ROWS, 4 * WIDTH, generator=generator),)


def rows(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, ROWS, WIDTH, generator=generator),)


def scores(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, HEADS, ROWS, ROWS, generator=generator),)


def logits(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    count = batch * ROWS
    return torch.randn(count, CLASSES, generator=generator), torch.randint(CLASSES, (count,), generator=generator)


FUNCTIONS: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "gelu": (nn.GELU, hidden),
    "gelu_tanh": (lambda: nn.GELU(approximate="tanh"), hidden),
    "silu": (nn.SiLU, hidden),
    "tanh": (lambda: Function(torch.tanh), hidden),
    "exp": (lambda: Function(torch.exp), hidden),
    "softmax": (lambda: nn.Softmax(-1), scores),
    "layer_norm": (lambda: nn.LayerNorm(WIDTH), rows),
    "cross_entropy": (lambda: Function(F.cross_entropy), logits),
}
