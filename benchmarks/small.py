"""Models so small that a call's overhead matters as much as its arithmetic."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

WIDTH = 32


def mlp(layers: int) -> nn.Module:
    """Returns a perceptron whose weights preserve the size of activations.

    With the default initialization, the result of 50 layers is the same for all inputs, and comparing it would show nothing.
    """
    model = nn.Sequential(*[item for _ in range(layers) for item in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])
    for linear in model[::2]:
        nn.init.kaiming_normal_(linear.weight)
        nn.init.zeros_(linear.bias)
    return model


class LstmLoop(nn.Module):
    """A Python loop over the steps of an LSTM cell."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(steps.shape[0], WIDTH, dtype=steps.dtype, device=steps.device)
        state = torch.zeros_like(hidden)
        for step in steps.unbind(1):
            hidden, state = self.cell(step, (hidden, state))
        return hidden


class Attention(nn.Module):
    """Self-attention with four heads."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.into(x).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape))


def vectors(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, WIDTH, generator=generator),)


def sequences(batch: int, generator: torch.Generator, length: int = 16) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, length, WIDTH, generator=generator),)
