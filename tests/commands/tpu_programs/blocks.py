"""Blocks and models that the benchmarks do not have."""

from __future__ import annotations

import torch
from benchmarks.suites import GptBlock
from torch import nn
from torch.nn import functional as F


class LlamaBlock(nn.Module):
    """A block of a Llama model: RMS norms, rotary embeddings, grouped heads, a gated MLP. Input and output: (batch, length, width)."""

    def __init__(self, width: int = 1024, heads: int = 16, key_heads: int = 4, hidden: int = 2816) -> None:
        super().__init__()
        self.heads, self.key_heads = heads, key_heads
        head = width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.query, self.out = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, key_heads * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        hidden = self.norm1(x)
        query = self.query(hidden).view(batch, length, self.heads, -1).transpose(1, 2)
        key, value = (layer(hidden).view(batch, length, self.key_heads, -1).transpose(1, 2) for layer in (self.key, self.value))
        query, key = _rotated(query), _rotated(key)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        hidden = self.norm2(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


def _rotated(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * frequencies
    cosine, sine = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


class Attention(nn.Module):
    """Causal attention of queries, keys and values. Several query heads may share one head of keys and values."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        is_grouped = query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True, enable_gqa=is_grouped)


class Gpt(nn.Module):
    """GPT-2 (small) with random weights. Maps tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, layers: int = 12, width: int = 768, vocabulary: int = 50304, length: int = 1024, heads: int = 12) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(GptBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.tokens.weight.T
