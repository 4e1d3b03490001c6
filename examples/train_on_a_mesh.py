"""Trains one of three models on eight devices in one process. Each step is one program, whose collectives XLA's partitioner chooses.

    python examples/train_on_a_mesh.py linear --way megatron-lm
    python examples/train_on_a_mesh.py gpt2
    python examples/train_on_a_mesh.py resnet50

linear    layers in Megatron's style. --way batch: each device has a part of the batch; megatron-lm: a part of each layer; fsdp: a part of
          the batch, and of each weight, which is gathered before its use
gpt2      transformers' GPT2LMHeadModel, unchanged, on a mesh of two by four devices: fsdp for the batch and the weights, tp for the layers
resnet50  torchvision's model. Each device has a part of the batch. Batch norms use the statistics of the whole batch, as on one device.
          Each block is the identity at first (zero_init_residual), as usual; otherwise rounding errors grow a thousandfold in each step,
          also on one device in float64

The data are generated. With --devices 1, the same model is trained without a mesh: losses agree up to rounding, with dropout, too.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import torch
from torch import nn
from torch.nn import functional as F

import dynaxla


@dataclass
class Workload:
    """A model with its data and its shardings.

    Attributes:
        model: The model.
        loss: Computes the loss from the model's output for x, and y.
        x: The inputs of a batch.
        y: The targets of the batch.
        optimizer: Creates the optimizer of parameters.
        sizes: The sizes of the mesh's axes.
        names: The names of the mesh's axes.
        weights: The shardings of parameters, by pattern.
        batch: The sharding of x and y.
    """

    model: nn.Module
    loss: Callable[[Any, torch.Tensor], torch.Tensor]
    x: torch.Tensor
    y: torch.Tensor
    optimizer: Callable[[Any], torch.optim.Optimizer]
    sizes: tuple[int, ...]
    names: tuple[str, ...]
    weights: Mapping[str, Any] = field(default_factory=dict)
    batch: tuple[str, ...] = ()


class Layers(nn.Module):
    """Residual layers, each with a product that widens and one that narrows."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.up, self.down, strict=True):
            x = x + down(F.gelu(up(x)))
        return x


def linear(way: str, devices: int) -> Workload:
    x = torch.randn(512, 64)
    y = x.roll(1, 1).tanh()
    weights = {
        "batch": {},
        "megatron-lm": {"up.*": ("model",), "down.*.weight": (None, "model")},  # needs one all-reduce for each layer and pass
        "fsdp": {"*": ("data",)},
    }[way]
    axis = "model" if way == "megatron-lm" else "data"
    batch = () if way == "megatron-lm" else ("data",)
    sgd = functools.partial(torch.optim.SGD, lr=0.5, momentum=0.9)
    return Workload(Layers(64, 3), F.mse_loss, x, y, sgd, (devices,), (axis,), weights, batch)


def gpt2(way: str, devices: int) -> Workload:
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=32, use_cache=False)
    starts, steps = torch.randint(128, (16, 1)), torch.randint(1, 8, (16, 1))
    tokens = (starts + steps * torch.arange(33)) % 128

    def loss(output: Any, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.logits.flatten(0, 1), y.flatten())

    weights = {  # transformers' Conv1D has (in, out). tp would divide the joint product of queries, keys and values in the wrong places.
        "*.c_attn.weight": ("fsdp",),
        "*.attn.c_proj.weight": ("tp", "fsdp"),
        "*.c_fc.weight": ("fsdp", "tp"),
        "*.c_fc.bias": ("tp",),
        "*.mlp.c_proj.weight": ("tp", "fsdp"),
        "*.wte.weight": ("tp", "fsdp"),
    }
    adam = functools.partial(torch.optim.AdamW, lr=1e-3)
    return Workload(
        transformers.GPT2LMHeadModel(config), loss, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), adam,
        (2, devices // 2), ("fsdp", "tp"), weights, ("fsdp",),
    )  # fmt: skip


def resnet50(way: str, devices: int) -> Workload:
    import torchvision

    y = torch.randint(10, (8,))
    x = torch.randn(8, 3, 32, 32) + F.one_hot(y, 10).float().repeat(1, 4)[:, None, None, :32]
    sgd = functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
    return Workload(
        torchvision.models.resnet50(num_classes=10, zero_init_residual=True),
        F.cross_entropy,
        x,
        y,
        sgd,
        (devices,),
        ("data",),
        {},
        ("data",),
    )


def train(work: Workload, steps: int, on_mesh: bool) -> list[float]:
    model, x, y = work.model.to("jax"), work.x.to("jax"), work.y.to("jax")
    if on_mesh:
        mesh = dynaxla.sharding.Mesh(work.sizes, work.names)
        dynaxla.sharding.shard_module(model, mesh, work.weights)
        for tensor in (x, y):
            dynaxla.sharding.mark_sharding(tensor, mesh, work.batch)
    optimizer = work.optimizer(model.parameters())

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = work.loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses = []
    for number in range(steps):
        losses.append(step(x, y).item())
        print(f"step {number + 1:3} loss {losses[-1]:.7f}")
    if on_mesh:
        print(dynaxla.sharding.report(step, x, y, run=False))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=["linear", "gpt2", "resnet50"])
    parser.add_argument("--way", choices=["batch", "megatron-lm", "fsdp"], default="batch", help="of the linear layers")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--devices", type=int, default=8)
    arguments = parser.parse_args()
    if arguments.devices > 1:
        jax.config.update("jax_num_cpu_devices", arguments.devices)  # virtual devices, without GPUs or TPUs
    dynaxla.device.enable()
    torch.manual_seed(0)
    work = {"linear": linear, "gpt2": gpt2, "resnet50": resnet50}[arguments.workload](arguments.way, arguments.devices)
    train(work, arguments.steps, arguments.devices > 1)


if __name__ == "__main__":
    main()
