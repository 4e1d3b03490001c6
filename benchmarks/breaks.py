"""Small models with graph breaks: TorchDynamo captures a part, Python code runs, and another captured part follows."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

log = logging.getLogger(__name__)
calls_seen = 0


def vectors(batch: int, generator: torch.Generator, width: int = 256) -> tuple[torch.Tensor, ...]:
    return (torch.randn(8 * batch, width, generator=generator),)


def prompts(batch: int, generator: torch.Generator, length: int = 8) -> tuple[torch.Tensor, ...]:
    return (torch.randint(1, Generate.vocabulary, (batch, length), generator=generator),)


class Layer(nn.Module):
    """A residual layer: after several of them, the result still depends on the input, whatever the weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


def perceptron(width: int = 256, layers: int = 4) -> nn.Sequential:
    return nn.Sequential(*[Layer(width) for _ in range(layers)])


class Branch(nn.Module):
    """A model in which a tensor's value decides which half runs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = perceptron(), perceptron(), perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.trunk(x)
        if x.sum() > 0:
            return self.left(hidden)
        return self.right(hidden) * 2


class Item(nn.Module):
    """A model that computes with a tensor's value as a Python number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = perceptron(), perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        peak = hidden.abs().max().item()
        return self.second(hidden / peak) * min(peak, 100.0)


class SideEffects(nn.Module):
    """A model with Python side effects between its layers: logging, a list, a global counter."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([perceptron(layers=2) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = []
        for number, stage in enumerate(self.stages):
            x = stage(x)
            seen.append(x.mean())
            log.debug("stage %d: %s", number, x.shape)
        count_call()
        return x + torch.stack(seen).sum()


def count_call() -> None:
    """Counts a call in a global variable. TorchDynamo does not trace this function: it runs at every call."""
    global calls_seen
    torch._dynamo.graph_break()
    calls_seen += 1


class NumpyRoundTrip(nn.Module):
    """A model that converts to NumPy, calls a function that torch does not have, and converts back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = perceptron(), perceptron()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        array = hidden.float().cpu().numpy()
        curve = np.interp(array, [-1.0, 0.0, 1.0], [-0.5, 0.0, 1.0])
        return self.second(torch.from_numpy(curve).to(hidden))


class Block(nn.Module):
    """A transformer layer with a causal mask."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class Generate(nn.Module):
    """A GPT that generates 20 tokens greedily, and stops at an end token: every step has another length."""

    vocabulary = 512

    def __init__(self, width: int = 128, layers: int = 2, heads: int = 4, tokens: int = 20) -> None:
        super().__init__()
        self.tokens = tokens
        self.embedding = nn.Embedding(self.vocabulary, width)
        self.position = nn.Embedding(64, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, self.vocabulary)
        with torch.no_grad():
            # Token 0 ends the text; random weights must not make it end by chance.
            self.head.bias[0] = -1e4

    def next_token(self, text: torch.Tensor) -> torch.Tensor:
        x = self.embedding(text) + self.position(torch.arange(text.shape[1], device=text.device))
        return self.head(self.norm(self.blocks(x))[:, -1]).argmax(dim=-1, keepdim=True)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        for _ in range(self.tokens):
            token = self.next_token(text)
            text = torch.cat([text, token], dim=1)
            if bool((token == 0).all()):
                break
        return text
