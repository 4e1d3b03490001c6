"""Tests of processes whose programs call equal or different collectives. See mismatched_collectives.py."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from cases.processes import mismatched_collectives
from support.processes.scripts import run_script
from support.timing import quick_compilation

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)

SCRIPT = """
import sys
from torch.multiprocessing import start_processes

def run(rank, *places):
    from cases.processes import mismatched_collectives
    mismatched_collectives.run(rank, *places)

start_processes(run, tuple(sys.argv[2:]), int(sys.argv[1]), start_method="fork")
"""


QUICK = [name for name in mismatched_collectives.CASES if name not in mismatched_collectives.SLOW]


def check(folder: Path, names: list[str]) -> None:
    """Runs these cases."""
    run_script(
        SCRIPT,
        [str(mismatched_collectives.WORLD), str(folder / "rendezvous"), str(folder / "results"), *names],
        XLA_FLAGS=quick_compilation.flags(),
    )
    results = [pickle.loads(Path(f"{folder / 'results'}{rank}").read_bytes()) for rank in range(mismatched_collectives.WORLD)]
    messages = [
        f"{name}, rank {rank}\n{error}" for rank, errors_by_case in enumerate(results) for name, error in errors_by_case.items() if error
    ]
    assert not messages, "\n".join(messages)


def test_agreement(tmp_path: Path) -> None:
    check(tmp_path, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", mismatched_collectives.SLOW)
def test_slow_agreement(name: str, tmp_path: Path) -> None:
    check(tmp_path, [name])
