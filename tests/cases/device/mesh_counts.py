"""With 64 devices: what programs of training steps move between 2, 8 and 64 of them is what theory says. They are compiled and read, and
run once; that their values are right, on_meshes.py and mesh_training.py show."""

from __future__ import annotations

import torch
from torch import nn

import dynaxla
from dynaxla import sharding
from dynaxla.sharding import Mesh, mark_sharding, shard_module

from .on_meshes import Block

COUNTS = (2, 8, 64)
# Of each the program has as many as heads, features and rows that 64 devices divide.
WIDTH, ROWS, LENGTH = 64, 64, 4


class Layers(nn.Module):
    """Megatron's: each a product that grows, and one that shrinks."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(count))
        self.down = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH, bias=False) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = down(nn.functional.gelu(up(x)))
        return x


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        return self.out(nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    """Blocks of attention and two layers, each behind a norm."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(count))
        self.attention = nn.ModuleList(Attention(WIDTH, WIDTH) for _ in range(count))
        self.blocks = nn.ModuleList(Block(WIDTH, 2 * WIDTH) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, attention, block in zip(self.norms, self.attention, self.blocks, strict=True):
            x = block(x + attention(norm(x)))
        return x


MEGATRON = {
    **{f"*.{name}.{part}": ("tp",) for name in ("query", "key", "value", "up") for part in ("weight", "bias")},
    **{f"*.{name}.weight": (None, "tp") for name in ("out", "down")},
}


def report_of(model: nn.Module, *batch: torch.Tensor) -> sharding.traffic.Report:
    updates = torch.optim.SGD(model.parameters(), lr=0.1)

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        updates.step()
        updates.zero_grad()
        return loss.detach()

    return sharding.report(step, *batch)


def moved(report: sharding.traffic.Report, *kinds: str) -> tuple[int, int]:
    """How many collectives there are, and how many bytes they give. Fails for one of another kind."""
    assert {item.kind for item in report.collectives} <= set(kinds), str(report)
    return sum(item.count for item in report.collectives), sum(item.bytes for item in report.collectives)


def parameters(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def check_megatrons_layers() -> None:
    for count in COUNTS:
        for layers in (1, 3):
            model = shard_module(Layers(layers), Mesh((count,), ("tp",)), {"up.*": ("tp",), "down.*": (None, "tp")})
            x = torch.randn(24, WIDTH).to("jax")
            found = report_of(model, x)
            assert moved(found, "all-reduce") == (2 * layers - 1, (2 * layers - 1) * x.nbytes), str(found)
            assert {item.axes for item in found.collectives} == {"tp"}
            (memory,) = found.memory
            assert memory.arguments < parameters(model) // count + x.nbytes + 64


def check_transformers() -> None:
    """Two sums of activations for each block on the way there, two on the way back; one of these is of what the query's, the key's and the
    value's product give, which XLA:CPU sums at once, but does not add before."""
    for count in COUNTS:
        layers, mesh = 2, Mesh((count,), ("tp",))
        model = shard_module(Transformer(layers), mesh, MEGATRON)
        x = torch.randn(2, LENGTH, WIDTH).to("jax")
        assert moved(report_of(model, x), "all-reduce") == (4 * layers, 6 * layers * x.nbytes)


def check_data_parallel() -> None:
    """Gradients and the loss are summed once."""
    for count in COUNTS:
        mesh = Mesh((count,), ("data",))
        for model, shape in ((Layers(3), (ROWS, WIDTH)), (Transformer(1), (ROWS, LENGTH, WIDTH))):
            shard_module(model, mesh, {})
            number, size = moved(report_of(model, mark_sharding(torch.randn(shape).to("jax"), mesh, ("data",))), "all-reduce")
            assert number == 1
            assert size == parameters(model) + 4


def check_fsdp() -> None:
    """Each weight is gathered once, and kept for the way back. Gradients are summed once; XLA:CPU, which makes no reduce-scatter of a sum
    and a slice, sums them whole. What a device keeps is its part."""
    for count in COUNTS:
        mesh = Mesh((count,), ("data",))
        for model, shape in ((Layers(3), (8 * WIDTH, WIDTH)), (Transformer(1), (2 * ROWS, LENGTH, WIDTH))):
            shard_module(model, mesh, {"*": ("data",)})
            x = mark_sharding(torch.randn(shape).to("jax"), mesh, ("data",))
            found, weights = report_of(model, x), list(model.parameters())
            moved(found, "all-gather", "all-reduce", "reduce-scatter")
            sizes = {item.kind: (item.count, item.bytes) for item in found.collectives}
            assert sizes.pop("all-gather") == (len(weights), parameters(model))
            assert sizes in ({"all-reduce": (1, parameters(model) + 4)}, {"reduce-scatter": (1, parameters(model) // count)}), str(found)
            (memory,) = found.memory
            assert memory.arguments <= (parameters(model) + x.nbytes) // count + 64
