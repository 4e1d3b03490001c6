"""Training on two processes of this machine; `python -m benchmarks.two_processes WAY RANK FILE` runs one of them.

The model is a small transformer with tensor parallelism, FSDP2 or DistributedDataParallel, over gloo, with one thread and one core for each
process. Engines take turns; each has a copy of the model with the same weights. A step is zero_grad, forward, backward and SGD. A round's
time is that of the slower process.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dynaxla.bench.benchmark_error import BenchmarkError
from dynaxla.bench.measure import Spread
from dynaxla.training import compile_step

from . import ROOT, tables
from .second_start import cpu_seconds

WORLD = 2
ENGINES = ("eager", "inductor", "dynaxla", "dynaxla_step")
WIDTH, HEADS, LAYERS, BATCH, LENGTH = 512, 8, 4, 4, 128
_ROUNDS, _LOSS_TOLERANCE = 15, 1e-3
# The results of a process, by engine: milliseconds of each round, CPU seconds of the first step, and the losses of the first steps.
Found = dict[str, dict[str, Any]]


class Block(nn.Module):
    """A decoder layer. With tensor parallelism each process has some of the heads and of the hidden features."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](x)
        heads = [layer(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def _tensor_parallel(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    plan = {name: ColwiseParallel() for name in ("query", "key", "value", "up")} | {name: RowwiseParallel() for name in ("out", "down")}
    for block in model:
        parallelize_module(block, mesh, plan)
    return model


def _fully_sharded(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (WORLD,))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


# By way: the function that wraps a model, and True if each process has a part of the batch.
WAYS: Mapping[str, tuple[Callable[[nn.Sequential], nn.Module], bool]] = {
    "tensor parallel": (_tensor_parallel, False),
    "FSDP2": (_fully_sharded, True),
    "DistributedDataParallel": (nn.parallel.DistributedDataParallel, True),
}


def runs() -> dict[str, Found]:
    """Returns by way and engine: the median "ms" of a step, its "lower" and "upper" quartiles, and CPU seconds of the "first" step.

    Raises: BenchmarkError if a process fails, or losses differ from eager mode's.
    """
    return {way: _together(way) for way in WAYS}


def _together(way: str) -> Found:
    """Runs the two processes, and returns their combined results."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        processes = []
        for rank in range(WORLD):
            command = [sys.executable, "-m", "benchmarks.two_processes", way, str(rank), str(folder / "rendezvous")]
            variables = {
                "DYNAXLA_CACHE": str(folder / f"dynaxla{rank}"),
                "TORCHINDUCTOR_CACHE_DIR": str(folder / f"inductor{rank}"),
                "TORCHINDUCTOR_COMPILE_THREADS": "1",  # Inductor's compilers are then child processes, whose time is counted
                "OMP_NUM_THREADS": "1",
            }
            streams = [stack.enter_context((folder / f"{stream}{rank}").open("w")) for stream in ("out", "error")]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=os.environ | variables, stdout=streams[0], stderr=streams[1]))
        codes = [process.wait() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                raise BenchmarkError(f"{way}, process {rank}: {[*(folder / f'error{rank}').read_text().splitlines(), 'it ended'][-2:][0]}")
        return combined(way, [json.loads((folder / f"out{rank}").read_text().splitlines()[-1]) for rank in range(WORLD)])


def combined(way: str, found: list[Found]) -> Found:
    """Combines the results of all processes into one row of the table. Raises: BenchmarkError if losses differ from eager mode's."""
    row: Found = {}
    for engine in ENGINES:
        mine = [each[engine] for each in found]
        losses, expected = (torch.tensor([each[name]["losses"] for each in found]) for name in (engine, "eager"))
        if not torch.allclose(losses, expected, rtol=_LOSS_TOLERANCE, atol=0):
            raise BenchmarkError(f"{way}, {engine}: the losses are {losses.tolist()}, eager mode's {expected.tolist()}")
        spread = Spread.of([max(times) for times in zip(*(each["ms"] for each in mine), strict=True)])
        row[engine] = {
            "ms": spread.median, "lower": spread.lower, "upper": spread.upper, "first": max(each["first"] for each in mine),
        }  # fmt: skip
    return row


def table(found: Mapping[str, Found]) -> list[str]:
    """Returns lines of Markdown. `found` is a result of `runs`."""
    lines = [
        f"Milliseconds of a training step of {LAYERS} layers of width {WIDTH}, with {BATCH} sequences of length {LENGTH}, with SGD, over",
        "gloo. Engines take turns. The time is that of the slower process. *dynaxla_step*: `dynaxla.compile_step`. *First*: CPU seconds",
        "of the slower process's first step, child processes included, with empty caches.",
        "",
        *tables.heading(
            ["", *[f"{engine} ms" for engine in ENGINES], "inductor / dynaxla", "inductor / dynaxla_step"]
            + [f"first, {engine}" for engine in ENGINES[1:]]
            + ["first, dynaxla / inductor"]
        ),
    ]  # fmt: skip
    for way, row in found.items():
        ms, first = ({engine: row[engine][what] for engine in ENGINES} for what in ("ms", "first"))
        ratios = [ms["inductor"] / ms[engine] for engine in ("dynaxla", "dynaxla_step")]
        cells = [f"{ms[engine]:.4g}" for engine in ENGINES] + [f"{ratio:.2f}" for ratio in ratios]
        cells += [f"{first[engine]:.2f}" for engine in ENGINES[1:]] + [f"{first['dynaxla'] / first['inductor']:.2f}"]
        lines.append(tables.line([way, *cells]))
    return lines


def _steps(way: str, rank: int) -> dict[str, Callable[[], float]]:
    """Returns a step for each engine, with a model of its own."""
    wrap, divides = WAYS[way]
    x, y = torch.randn(2, BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))
    if divides:
        x, y = (item.chunk(WORLD)[rank] for item in (x, y))

    def step_of(engine: str) -> Callable[[], float]:
        torch.manual_seed(0)
        model = wrap(nn.Sequential(*[Block() for _ in range(LAYERS)]))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        called = torch.compile(model, backend=engine) if engine in ("inductor", "dynaxla") else model

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(called(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = compile_step(step) if engine == "dynaxla_step" else step
        return lambda: float(run())

    return {engine: step_of(engine) for engine in ENGINES}


def _rehearse() -> None:
    """Compiles a tiny function with each compiler, so that work that is done once per process is not measured."""
    for backend in ("inductor", "dynaxla"):
        torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(4, requires_grad=True)).sum().backward()


def _measure(way: str, rank: int, rendezvous: str) -> Found:
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    patience = datetime.timedelta(minutes=5)  # the longest wait for the other process, which may have failed
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD, timeout=patience)
    _rehearse()
    steps = _steps(way, rank)
    found: Found = {engine: {"ms": []} for engine in ENGINES}
    for engine, step in steps.items():
        before = cpu_seconds()
        losses = [step()]
        found[engine]["first"] = cpu_seconds() - before
        found[engine]["losses"] = [*losses, step(), step()]
    for number in range(_ROUNDS):
        start = number % len(ENGINES)
        for engine in ENGINES[start:] + ENGINES[:start]:
            steps[engine]()
            dist.barrier()
            before_wall = time.perf_counter()
            steps[engine]()
            found[engine]["ms"].append((time.perf_counter() - before_wall) * 1e3)
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], int(sys.argv[2]), sys.argv[3])))
