"""Processes whose programs call the same collectives, and processes whose programs do not. See disagreements.py."""

from __future__ import annotations

import pickle
from pathlib import Path

import disagreements
import pytest
import quick
import torch
from scripts import run_script

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)

SCRIPT = """
import sys
from torch.multiprocessing import start_processes

def run(rank, *places):
    import disagreements
    disagreements.run(rank, *places)

start_processes(run, tuple(sys.argv[2:]), int(sys.argv[1]), start_method="fork")
"""


QUICK = [name for name in disagreements.CASES if name not in disagreements.SLOW]


def check(folder: Path, names: list[str]) -> None:
    """Runs these cases. XLA compiles quickly: its code is not the subject."""
    run_script(SCRIPT, [str(disagreements.WORLD), str(folder / "rendezvous"), str(folder / "results"), *names], XLA_FLAGS=quick.flags())
    results = [pickle.loads(Path(f"{folder / 'results'}{rank}").read_bytes()) for rank in range(disagreements.WORLD)]
    errors = [f"{name}, rank {rank}\n{error}" for rank, found in enumerate(results) for name, error in found.items() if error]
    assert not errors, "\n".join(errors)


def test_agreement(tmp_path: Path) -> None:
    check(tmp_path, QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("name", disagreements.SLOW)
def test_slow_agreement(name: str, tmp_path: Path) -> None:
    check(tmp_path, [name])
