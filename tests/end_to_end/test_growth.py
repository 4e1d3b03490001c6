"""Tests that repeated compiling and resetting leaves no objects of dynaxla and no tracers of JAX.

Some memory of other libraries remains: about 0.1 MB a cycle of TorchDynamo's guards, with every backend (finalizers of guarded functions
hold a `CheckFunctionManager`); TorchDynamo's compiled functions after a graph break (they stay in the module's globals); and small keys in
JAX's bounded caches of jit's parameters.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable

import jax
import pytest
import torch

import dynaxla
from support.processes.scripts import run_script

# The number of repetitions. A cycle that leaves one object each time is detected.
CYCLES = 3


def _objects() -> Counter[str]:
    gc.collect()
    kinds = (type(obj) for obj in gc.get_objects())
    return Counter(kind.__qualname__ for kind in kinds if issubclass(kind, jax.core.Tracer) or str(kind.__module__).startswith("dynaxla"))


@torch.library.custom_op("dynaxla_test::grown", mutates_args=())
def grown(x: torch.Tensor) -> torch.Tensor:
    return x * 2


grown.register_fake(torch.empty_like)


def _model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))


def _infer() -> None:
    with torch.no_grad():
        torch.compile(_model(), backend="dynaxla")(torch.ones(2, 8))


def _freeze() -> None:
    with torch.no_grad():
        torch.compile(_model(), backend="dynaxla", options={"freeze": True})(torch.ones(2, 8))


def _train() -> None:
    torch.compile(_model(), backend="dynaxla")(torch.ones(2, 8)).sum().backward()


def _fall_back_and_split() -> None:
    torch.compile(lambda x: grown(x)[x > 0] * 3, backend="dynaxla", fullgraph=True)(torch.ones(5))


def _fail() -> None:
    with pytest.raises(IndexError):
        torch.compile(lambda x, i: x[i], backend="dynaxla")(torch.ones(5), torch.tensor([7]))


def _step() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @dynaxla.compile_step(fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step(torch.ones(2, 8))


@pytest.mark.parametrize("cycle", [_infer, _freeze, _train, _fall_back_and_split, _fail, _step], ids=lambda cycle: cycle.__name__)
def test_cycles_leave_no_objects(cycle: Callable[[], None], quick_xla: None) -> None:
    for round in range(2 + CYCLES):
        torch._dynamo.reset()
        cycle()
        if round == 1:
            torch._dynamo.reset()
            before = _objects()
    torch._dynamo.reset()
    more = {name: count for name, count in (_objects() - before).items() if count >= CYCLES}
    assert not more, f"objects left by {CYCLES} more cycles"


# Training with batches that grow and shrink, with dynaxla or with AOTAutograd and eager mode. Prints the resident memory in MiB after 200
# and 2,000 steps, and the maximum in between.
LOOP = """
import gc, random, sys
import torch
from torch import nn

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20

torch.manual_seed(0)
torch.set_num_threads(1)
random.seed(0)
net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.LayerNorm(512), nn.Linear(512, 256))
optimizer = torch.optim.AdamW(net.parameters())
compiled = torch.compile(net, backend=sys.argv[1], dynamic=True)
sizes = [8, 24, 72, 200, 640, 1500, 640, 200, 72, 24]
most = 0.0
for step in range(2000):
    x = torch.randn(sizes[step // 20 % len(sizes)] + step % 3, 256)
    compiled(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 199:
        gc.collect()
        early = resident()
    if step >= 200:
        most = max(most, resident())
gc.collect()
print(early, resident(), most)
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "dynaxla"])
def test_resident_memory_does_not_grow(backend: str) -> None:
    early, late, most = map(float, run_script(LOOP, [backend]).split())
    print(f"{backend}: {early:.0f} MiB after 200 steps, {late:.0f} after 2,000, at most {most:.0f} in between")
    assert late < early + 48  # the size of a largest batch with its activations
