"""One step of generation: a token's keys and values are written into caches, which attention reads.

The caches are full, and a call overwrites their last row, so that every call with the same input does the same.
"""

from __future__ import annotations

import time

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, CACHED_HEADS, LAYERS = 768, 12, 4, 12
HEAD = WIDTH // HEADS


class Int8Linear(nn.Module):
    """A linear layer with a weight of 8-bit integers and a scale for each row of the weight, which is dequantized in each call."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale[:, 0])
        self.register_buffer("bias", linear.bias.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype)) * self.scale + self.bias


class Row(nn.Module):
    """Writes a row into a cache. The result does not depend on the cache, so that the time does not include reading it."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("cache", torch.randn(1, HEADS, length, HEAD))
        self.register_buffer("position", torch.tensor([length - 1]))

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(2, self.position, row)
        return row * 2


class Attention(nn.Module):
    """Attention of one token for each sequence over all positions of the cache. Several query heads share one cached head."""

    def __init__(self, length: int, sequences: int = 1) -> None:
        super().__init__()
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.key, self.value = nn.Linear(WIDTH, CACHED_HEADS * HEAD), nn.Linear(WIDTH, CACHED_HEADS * HEAD)
        self.register_buffer("keys", torch.randn(sequences, CACHED_HEADS, length, HEAD))
        self.register_buffer("values", torch.randn(sequences, CACHED_HEADS, length, HEAD))
        self.register_buffer("position", torch.tensor([length - 1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (linear(x).view(*x.shape[:2], -1, HEAD).transpose(1, 2) for linear in (self.query, self.key, self.value))
        self.keys.index_copy_(2, self.position, key)
        self.values.index_copy_(2, self.position, value)
        attended = F.scaled_dot_product_attention(query, self.keys, self.values, enable_gqa=True)
        return self.out(attended.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """A decoder layer."""

    def __init__(self, length: int, sequences: int = 1) -> None:
        super().__init__()
        self.attention, self.first, self.second = Attention(length, sequences), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.first(x))
        return x + self.mlp(self.second(x))


def decoder(length: int, sequences: int = 1, layers: int = LAYERS) -> nn.Module:
    """Returns a decoder without embeddings, with caches of this length for this number of sequences."""
    return nn.Sequential(*[Block(length, sequences) for _ in range(layers)])


def int8_decoder(length: int, sequences: int = 1, layers: int = LAYERS) -> nn.Module:
    """Returns the same decoder with linear layers whose weights are 8-bit integers."""
    model = decoder(length, sequences, layers)
    linears = [
        (parent, name, child) for parent in model.modules() for name, child in parent.named_children() if isinstance(child, nn.Linear)
    ]
    for parent, name, child in linears:
        setattr(parent, name, Int8Linear(child))
    return model


def rows(batch: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
    return (torch.randn(batch, HEADS, 1, HEAD, generator=generator),)


def tokens(batch: int, generator: torch.Generator, sequences: int = 1) -> tuple[torch.Tensor, ...]:
    """Returns one token for each sequence. With a batch of 1, the tokens fit a model whose caches are for `sequences` sequences."""
    return (torch.randn(batch * sequences, 1, WIDTH, generator=generator),)


def reading_ms(model: nn.Module, rounds: int = 9) -> float:
    """Returns milliseconds for reading all weights and caches once, at the best speed at which this machine sums a large tensor."""
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    large = torch.zeros(1 << 26)
    best = float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        large.sum()
        best = min(best, time.perf_counter() - start)
    return size / large.nbytes * best * 1e3
