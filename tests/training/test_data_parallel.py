"""Training on several processes with torch's own parallelism, compared with one process that has the whole batch.

The cases are in tests/cases/processes/parallelisms.py.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from cases.processes import parallelisms
from support.processes.scripts import run_script
from support.releases import IS_OLDEST
from support.timing import quick_compilation

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)

SCRIPT = """
import sys
from torch.multiprocessing import start_processes

def run(rank, *settings):
    from cases.processes import parallelisms
    parallelisms.LAYERS = int(layers)
    parallelisms.run(rank, *settings)

layers, world, rendezvous, results, *names = sys.argv[1:]
start_processes(run, (int(world), rendezvous, results, names), int(world), start_method="fork")
"""
# Recorded steps, and steps in eager mode with a compiled model. test_fully_sharded.py records steps with FSDP2.
QUICK = [
    *("tensor_parallel/recorded/adamw", "parametrized_fsdp/recorded/sgd", "data_parallel/recorded/sgd"),
    *("tensor_parallel/model/sgd", "fsdp/model/adamw"),
]


def results_by_case(folder: Path, world: int, names: list[str], layers: int = parallelisms.LAYERS) -> dict[str, list[parallelisms.Found]]:
    """Returns the results of each process by case, for a network with this number of blocks. XLA optimizes little."""
    run_script(
        SCRIPT, [str(layers), str(world), str(folder / "rendezvous"), str(folder / "results"), *names], XLA_FLAGS=quick_compilation.flags()
    )
    results = [pickle.loads(Path(f"{folder / 'results'}{rank}").read_bytes()) for rank in range(world)]
    return {name: [result[name] for result in results] for name in names}


def check(results: dict[str, list[parallelisms.Found]]) -> None:
    for name, rank_results in results.items():
        errors = [error for error, _ in rank_results if error]
        assert not errors, f"{name}\n" + "\n".join(errors)
        if "/recorded/" in name:
            assert all((counts["steps"], counts["calls"]) == (3, 3) for _, counts in rank_results), f"{name}: {rank_results}"


def test_two_processes_train_as_one(tmp_path: Path) -> None:
    """The network has one block. In `test_each_parallelism`, it has several equal blocks."""
    check(results_by_case(tmp_path, 2, QUICK, layers=1))


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("parallelism", parallelisms.WAYS)
def test_each_parallelism(parallelism: str, world: int, tmp_path: Path) -> None:
    if world < parallelisms.WAYS[parallelism][1]:
        pytest.skip("a mesh of two dimensions needs four processes")
    # torch 2.11 has another FSDP2, of which no step is recorded.
    modes = [mode for mode in parallelisms.MODES if not (IS_OLDEST and mode == "recorded" and parallelism in parallelisms.FULLY_SHARDED)]
    check(
        results_by_case(tmp_path, world, [f"{parallelism}/{mode}/{optimizer}" for mode in modes for optimizer in parallelisms.OPTIMIZERS])
    )
