"""Tests of collectives in programs, between programs and in steps, in two processes (see tests/cases/processes/collectives.py)."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from cases.processes import collectives
from support.processes.scripts import run_script
from support.releases import IS_OLDEST
from support.timing import quick_compilation

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)


# TorchDynamo of torch 2.11 does not trace one of the collectives of this case.
FAILS_ON_OLDEST = "gather_scatter_and_exchange", True

SCRIPT = """
import sys
from torch.multiprocessing import start_processes

def run(rank, *places):
    from cases.processes import collectives
    collectives.run(rank, *places)

start_processes(run, tuple(sys.argv[2:]), int(sys.argv[1]), start_method="fork")
"""


def run(folder: Path, *names: str) -> list[dict[str, str]]:
    """Returns each process's errors by case. names: the cases; by default all."""
    arguments = [str(collectives.WORLD), str(folder / "rendezvous"), str(folder / "results")]
    run_script(SCRIPT, [*arguments, *names], XLA_FLAGS=quick_compilation.flags())
    return [pickle.loads(Path(f"{folder / 'results'}{rank}").read_bytes()) for rank in range(collectives.WORLD)]


def test_all_cases_agree_with_eager_mode(tmp_path: Path) -> None:
    """All cases share two processes, because starting processes takes as long as the cases."""
    failures = [
        f"{name}: {error}" for errors in run(tmp_path) for name, error in errors.items() if error and (name, IS_OLDEST) != FAILS_ON_OLDEST
    ]
    assert not failures, "\n".join(failures)


@pytest.mark.slow
def test_many_independent_collectives_in_random_order(tmp_path: Path) -> None:
    """A program has a hundred independent collectives, ordered only by the graph: a thousand calls, four threads, random delays."""
    assert [errors["many_independent"] for errors in run(tmp_path, "many_independent")] == ["", ""]
