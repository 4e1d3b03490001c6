"""With 64 devices: training steps on 2, 8 and 64 devices have the collectives that theory predicts.

The programs are compiled, inspected and run once. on_meshes.py and mesh_training.py check their values.
"""

from __future__ import annotations

import torch
from torch import nn

import dynaxla
from dynaxla import sharding
from dynaxla.sharding import Mesh, mark_sharding, shard_module

from .mesh_training import Attention
from .on_meshes import Block, Layers

COUNTS = (2, 8, 64)
# The numbers of heads, features and rows are multiples of 64.
WIDTH, ROWS, LENGTH = 64, 64, 4


class Transformer(nn.Module):
    """Blocks of attention and two linear layers, with a norm before each."""

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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return sharding.report(step, *batch)


def moved(report: sharding.traffic.Report, *kinds: str) -> tuple[int, int]:
    """Returns the number of collectives and the bytes of their results. Fails if there is a collective of another kind."""
    assert {item.kind for item in report.collectives} <= set(kinds), str(report)
    return sum(item.count for item in report.collectives), sum(item.bytes for item in report.collectives)


def parameters(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def check_tensor_parallel_layers() -> None:
    for count in COUNTS:
        for layers in (1, 3):
            model = shard_module(Layers(layers, WIDTH), Mesh((count,), ("tp",)), {"up.*": ("tp",), "down.*": (None, "tp")})
            x = torch.randn(24, WIDTH).to("jax")
            report = report_of(model, x)
            assert moved(report, "all-reduce") == (2 * layers - 1, (2 * layers - 1) * x.nbytes), str(report)
            assert {item.axes for item in report.collectives} == {"tp"}
            (memory,) = report.memory
            assert memory.arguments < parameters(model) // count + x.nbytes + 64


def check_tensor_parallel_transformers() -> None:
    """Each block has two all-reduces in the forward pass, and two in the backward pass.

    One of the latter is of the gradients through query, key and value: XLA:CPU reduces the three at once, without adding them first.
    """
    for count in COUNTS:
        layers, mesh = 2, Mesh((count,), ("tp",))
        model = shard_module(Transformer(layers), mesh, MEGATRON)
        x = torch.randn(2, LENGTH, WIDTH).to("jax")
        assert moved(report_of(model, x), "all-reduce") == (4 * layers, 6 * layers * x.nbytes)


def check_data_parallel() -> None:
    """One all-reduce sums all gradients and the loss."""
    for count in COUNTS:
        mesh = Mesh((count,), ("data",))
        for model, shape in ((Layers(3, WIDTH), (ROWS, WIDTH)), (Transformer(1), (ROWS, LENGTH, WIDTH))):
            shard_module(model, mesh, {})
            number, size = moved(report_of(model, mark_sharding(torch.randn(shape).to("jax"), mesh, ("data",))), "all-reduce")
            assert number == 1
            assert size == parameters(model) + 4


def check_fsdp() -> None:
    """Each weight is gathered once, and is kept for the backward pass. Each device stores only its shard of the parameters.

    Gradients are summed once. XLA:CPU, which does not turn a sum and a slice into a reduce-scatter, sums whole gradients.
    """
    for count in COUNTS:
        mesh = Mesh((count,), ("data",))
        for model, shape in ((Layers(3, WIDTH), (8 * WIDTH, WIDTH)), (Transformer(1), (2 * ROWS, LENGTH, WIDTH))):
            shard_module(model, mesh, {"*": ("data",)})
            x = mark_sharding(torch.randn(shape).to("jax"), mesh, ("data",))
            report, weights = report_of(model, x), list(model.parameters())
            moved(report, "all-gather", "all-reduce", "reduce-scatter")
            sizes = {item.kind: (item.count, item.bytes) for item in report.collectives}
            assert sizes.pop("all-gather") == (len(weights), parameters(model))
            assert sizes in ({"all-reduce": (1, parameters(model) + 4)}, {"reduce-scatter": (1, parameters(model) // count)}), str(report)
            (memory,) = report.memory
            assert memory.arguments <= (parameters(model) + x.nbytes) // count + 64
