"""Ways to train on several processes, compared with one process and the whole batch, for tests/training/test_data_parallel.py."""

from __future__ import annotations

import os
import pickle
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import parametrize

import dynaxla

# float64, because rounding errors in float32 would hide small differences.
DTYPE = torch.float64
WIDTH, HIDDEN, LAYERS, BATCH = 8, 16, 2, 8


class Block(nn.Module):
    """A residual block. Tensor parallelism divides its hidden features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(LAYERS)], nn.Linear(WIDTH, 3)).to(DTYPE)


# A wrapped network, and this process's part of a batch: the index of the part, and the number of parts.
Wrapped = tuple[nn.Module, int, int]


def tensor_parallel(net: nn.Module) -> Wrapped:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in list(net)[:LAYERS]:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net, 0, 1


def fsdp(net: nn.Module) -> Wrapped:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in list(net)[:LAYERS]:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, dist.get_rank(), dist.get_world_size()


def hybrid(net: nn.Module) -> Wrapped:
    """FSDP with parameters sharded along one dimension of the mesh and replicated along the other."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    for block in list(net)[:LAYERS]:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, dist.get_rank(), dist.get_world_size()


def tensor_parallel_and_fsdp(net: nn.Module) -> Wrapped:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("fsdp", "tp"))
    for block in list(net)[:LAYERS]:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["fsdp"])
    fully_shard(net, mesh=mesh["fsdp"])
    return net, mesh["fsdp"].get_local_rank(), mesh["fsdp"].size()


def data_parallel(net: nn.Module) -> Wrapped:
    return nn.parallel.DistributedDataParallel(net), dist.get_rank(), dist.get_world_size()


class _Gathered(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.mesh = mesh

    def forward(self, x: DTensor) -> torch.Tensor:
        return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def parametrized_fsdp(net: nn.Module) -> Wrapped:
    """FSDP by a parametrization that gathers DTensors (SimpleFSDP)."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in list(net.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [Shard(0)])))
            parametrize.register_parametrization(module, name, _Gathered(mesh), unsafe=True)
    return net, dist.get_rank(), dist.get_world_size()


WAYS: dict[str, tuple[Callable[[nn.Module], Wrapped], int]] = {
    "tensor_parallel": (tensor_parallel, 2),
    "fsdp": (fsdp, 2),
    "parametrized_fsdp": (parametrized_fsdp, 2),
    "data_parallel": (data_parallel, 2),
    "hybrid": (hybrid, 4),
    "tensor_parallel_and_fsdp": (tensor_parallel_and_fsdp, 4),
}
FULLY_SHARDED = ("fsdp", "hybrid", "tensor_parallel_and_fsdp")  # by `fully_shard`
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
}
# The options of compiled models and steps.
OPTIONS: dict[str, Any] = {}
MODES = ("eager", "model", "step", "recorded")
Found = tuple[str, dict[str, int]]  # the error, and the changes of the counters


def batches(steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(BATCH, WIDTH, generator=generator, dtype=DTYPE), torch.randn(BATCH, 3, generator=generator, dtype=DTYPE))
        for _ in range(steps)
    ]


def train(net: nn.Module, mode: str, optimizer: str, part: tuple[int, int], steps: int = 3) -> list[float]:
    """Trains, and returns the losses for this process's part of the batches."""
    optim = OPTIMIZERS[optimizer](net.parameters())
    model = torch.compile(net, backend="dynaxla", options=OPTIONS) if mode == "model" else net

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optim.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optim.step()
        return loss.detach()

    run = dynaxla.compile_step(step, fullgraph=mode == "recorded", options=OPTIONS) if mode in ("step", "recorded") else step
    index, count = part
    return [float(run(x.chunk(count)[index], y.chunk(count)[index])) for x, y in batches(steps)]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def agree(way: str, mode: str, optimizer: str) -> None:
    """Losses and parameters are as on one process."""
    alone = network()
    expected = train(alone, "eager", optimizer, (0, 1))
    net = network()
    wrapped, index, count = WAYS[way][0](net)
    losses = torch.tensor(train(wrapped, mode, optimizer, (index, count)), dtype=DTYPE)
    dist.all_reduce(losses)
    losses /= dist.get_world_size()
    torch.testing.assert_close(losses, torch.tensor(expected, dtype=DTYPE), rtol=1e-9, atol=1e-9)
    found = dict(net.named_parameters())
    for name, parameter in alone.named_parameters():
        mine = found.get(name)
        if mine is None:
            head, _, last = name.rpartition(".")
            mine = found[f"{head}.parametrizations.{last}.original"]
        torch.testing.assert_close(whole(mine), parameter.detach(), rtol=1e-6, atol=1e-8)


def run(rank: int, world: int, rendezvous: str, results: str, names: list[str]) -> None:
    """Runs cases ("way/mode/optimizer") in one process of the group, and writes their errors and counts to a file."""
    os.environ["DYNAXLA_CACHE"] = ""
    torch.set_num_threads(1)
    warnings.filterwarnings("error", message=".*unwaited.*")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    found: dict[str, Found] = {}
    for name in names:
        torch._dynamo.reset()
        before = dynaxla.metrics.snapshot()
        error = ""
        try:
            agree(*name.split("/"))
        except BaseException:
            error = traceback.format_exc()
        after = dynaxla.metrics.snapshot()
        found[name] = error, {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key, 0)}
        dist.barrier()
    Path(f"{results}{rank}").write_bytes(pickle.dumps(found))
    dist.destroy_process_group()
