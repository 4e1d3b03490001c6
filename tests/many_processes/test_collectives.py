"""Collectives inside programs, between programs and in steps: two processes, compared with eager mode by cases/processes/collectives.py."""

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


# TorchDynamo of torch 2.11 does not trace a collective in it.
FAILS = "gather_scatter_and_exchange", True

SCRIPT = """
import sys
from torch.multiprocessing import start_processes

def run(rank, *places):
    from cases.processes import collectives
    collectives.run(rank, *places)

start_processes(run, tuple(sys.argv[2:]), int(sys.argv[1]), start_method="fork")
"""


def run(folder: Path, *names: str) -> list[dict[str, str]]:
    """What each process raised, by case. names: of the cases, else all. XLA compiles quickly: its code is not the subject."""
    places = [str(collectives.WORLD), str(folder / "rendezvous"), str(folder / "results")]
    run_script(SCRIPT, [*places, *names], XLA_FLAGS=quick_compilation.flags())
    return [pickle.loads(Path(f"{folder / 'results'}{rank}").read_bytes()) for rank in range(collectives.WORLD)]


def test_as_in_eager(tmp_path: Path) -> None:
    """All cases in the same two processes, whose start takes as long."""
    wrong = [f"{name}: {error}" for of_rank in run(tmp_path) for name, error in of_rank.items() if error and (name, IS_OLDEST) != FAILS]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow
def test_a_hundred_thousand_collectives(tmp_path: Path) -> None:
    """A hundred in a program, which nothing but their order in the graph orders: a thousand calls, four threads, random delays."""
    assert [found["many_independent"] for found in run(tmp_path, "many_independent")] == ["", ""]
