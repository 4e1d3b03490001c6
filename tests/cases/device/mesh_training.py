"""With eight devices: 20 training steps have the losses of training on one device, in each mode."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dynaxla
from dynaxla.sharding import Mesh, mark_sharding, shard_module

from .on_meshes import MESH, SPECS, Block, spec_of
from .running import MODES


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class _Gpt(nn.Module):
    """A language model whose embedding and last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(32, 16), nn.Embedding(8, 16)
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(2))
        self.attention = nn.ModuleList(Attention(16, 4) for _ in range(2))
        self.blocks = nn.ModuleList(Block(16, 64) for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for norm, attention, block in zip(self.norms, self.attention, self.blocks, strict=True):
            x = block(x + attention(norm(x)))
        return self.head(x).transpose(1, 2)


_ATTENTION = {
    **{f"*.{name}.weight": ("tp", "fsdp") for name in ("query", "key", "value")},
    **{f"*.{name}.bias": ("tp",) for name in ("query", "key", "value")},
    "*.out.weight": ("fsdp", "tp"),
    "words.weight": ("tp", "fsdp"),
}


def _losses(name: str, mode: str, optimizer: str, mesh: Mesh | None) -> tuple[list[float], nn.Module, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    if name == "gpt":
        model: nn.Module = _Gpt().to("jax")
        tokens = torch.randint(32, (8, 9)).to("jax")
        x, y, specs, loss_of = tokens[:, :-1].clone(), tokens[:, 1:].clone(), {**SPECS, **_ATTENTION}, nn.functional.cross_entropy
    else:
        model = nn.Sequential(Block(16, 32), Block(16, 32)).to("jax")
        x, y, specs, loss_of = torch.randn(16, 16).to("jax"), torch.randn(16, 16).to("jax"), dict(SPECS), nn.functional.mse_loss
    if mesh is not None:
        shard_module(model, mesh, specs)
        mark_sharding(x, mesh, ("fsdp",))
    run: Any = torch.compile(model, backend="dynaxla") if mode == "compiled" else model
    updates = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        updates.zero_grad()
        loss = loss_of(run(x), y)
        loss.backward()
        updates.step()
        return loss.detach()

    training: Any = dynaxla.compile_step(step, fullgraph=True) if mode == "step" else step
    losses = []
    for _ in range(20):
        with MODES.get(mode, MODES["eager"])():
            loss = training(x, y)
        losses.append(loss.item())
    return losses, model, updates


def _check(name: str, mode: str, optimizer: str) -> None:
    expected, *_ = _losses(name, mode, optimizer, None)
    found, model, updates = _losses(name, mode, optimizer, MESH)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    weights = dict(model.named_parameters())
    assert spec_of(weights["blocks.0.up.weight" if name == "gpt" else "0.up.weight"]) == ("tp", "fsdp")
    assert all(spec_of(parameter) is not None for parameter in model.parameters())
    for parameter, state in updates.state.items():
        moments = [tensor for tensor in state.values() if isinstance(tensor, torch.Tensor) and tensor.dim()]
        assert [spec_of(tensor) for tensor in moments] == [spec_of(parameter)] * len(moments), mode
        if mode in ("compiled", "eager"):
            assert spec_of(parameter.grad) == spec_of(parameter), mode


def check_layers() -> None:
    for mode in ("compiled", "step", "eager", "lazy"):
        for optimizer in ("SGD", "AdamW"):
            _check("layers", mode, optimizer)


def check_gpt() -> None:
    for mode, optimizer in [("compiled", "AdamW"), ("step", "SGD"), ("step", "AdamW"), ("eager", "AdamW"), ("lazy", "SGD")]:
        _check("gpt", mode, optimizer)
