"""FSDP2 in compiled steps, on two processes, compared with eager mode. The cases are in tests/cases/processes/fully_sharded.py."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from cases.processes import fully_sharded
from support.processes.scripts import run_script
from support.timing import quick_compilation

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)

SCRIPT = """
import sys
from torch.multiprocessing import start_processes

def run(rank, *settings):
    from cases.processes import fully_sharded
    fully_sharded.run(rank, *settings)

world, rendezvous, results, *names = sys.argv[1:]
start_processes(run, (rendezvous, results, names), int(world), start_method="fork")
"""
QUICK = ["step_with_and_without_gradient_sync", "collectives_of_a_step"]
FALLS_BACK = "unknown_internals_of_torch_run_eagerly"


def supports_gathering() -> bool:
    """True if a step can gather parameters instead of FSDP2's hooks: torch 2.12 and later. Other releases fall back to the hooks."""
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return hasattr(FSDPState, "_cast_forward_inputs")


needs_gathering = pytest.mark.skipif(not supports_gathering(), reason="this torch's FSDP2 has other internals: steps use torch's hooks")


def check(folder: Path, names: list[str]) -> None:
    """Runs these cases. XLA compiles quickly, with few optimizations."""
    run_script(
        SCRIPT, [str(fully_sharded.WORLD), str(folder / "rendezvous"), str(folder / "results"), *names], XLA_FLAGS=quick_compilation.flags()
    )
    for rank in range(fully_sharded.WORLD):
        results = pickle.loads(Path(f"{folder / 'results'}{rank}").read_bytes())
        errors = [f"{name}, process {rank}\n{error}" for name, error in results.items() if error]
        assert not errors, "\n".join(errors)


@pytest.mark.sample(usual=1)
@needs_gathering
def test_quick_cases(tmp_path: Path) -> None:
    check(tmp_path, QUICK)


def test_fallback_to_torchs_hooks(tmp_path: Path) -> None:
    check(tmp_path, [FALLS_BACK])


@needs_gathering
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in fully_sharded.CASES if name not in (*QUICK, FALLS_BACK)])
def test_other_cases(name: str, tmp_path: Path) -> None:
    check(tmp_path, [name])


# This process is one of eight: collectives of the backend "fake" do nothing. The executable says how much memory XLA allocates.
MEMORY = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import dynaxla
from dynaxla.runtime import programs

WORLD, WIDTH, ROWS = 8, 256, 128
compiled, temporary = programs._program, []


def noting(executable, *args):
    temporary.append(executable.get_compiled_memory_stats().temp_size_in_bytes)
    return compiled(executable, *args)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def of_a_step(layers):
    net = nn.Sequential(*(Block() for _ in range(layers)))
    whole = sum(parameter.numel() for parameter in net.parameters())
    for block in net:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters())

    def step(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    dynaxla.compile_step(step, fullgraph=True)(torch.randn(ROWS, WIDTH))
    states = [item for state in optimizer.state.values() for item in state.values() if isinstance(item, DTensor)]
    assert len(states) == 2 * len(list(net.parameters()))
    mine = sum(tensor.to_local().numel() for tensor in [*net.parameters(), *states])
    assert mine <= 1.01 * 3 * whole / WORLD, (mine, whole)
    return temporary[-1], 4 * whole


programs._program = noting
dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
mesh = init_device_mesh("cpu", (WORLD,))
(less, _), (more, parameters) = of_a_step(12), of_a_step(24)
activations = 4 * ROWS * (WIDTH + 4 * WIDTH)  # what autograd saves of a layer: the inputs of its products
print(f"12 layers: {less / 1e6:.2f} MB, 24 layers: {more / 1e6:.2f} MB; of 12 layers: activations {12 * activations / 1e6:.2f} MB, "
      f"parameters {parameters / 2e6:.2f} MB")
assert more - less <= 1.05 * 12 * activations
"""


@needs_gathering
@pytest.mark.slow
def test_whole_parameters_are_freed_between_forward_and_backward_pass() -> None:
    """`pytest -m slow tests/training/test_fully_sharded.py -k whole_parameters -s` prints the figures."""
    print(run_script(MEMORY, []))
