"""Collectives inside of programs and between them, and in steps: two processes, each compared with eager mode. See collectives.py."""

from __future__ import annotations

import pickle
from pathlib import Path

import collectives
import pytest
import torch
from newer import cases
from scripts import run_script

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)


SCRIPT = """
import sys
from torch.multiprocessing import start_processes

def run(rank, *places):
    import collectives
    collectives.run(rank, *places)

start_processes(run, tuple(sys.argv[2:]), int(sys.argv[1]), start_method="fork")
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each process raised, by case."""
    return run(tmp_path_factory.mktemp("group"))


def run(folder: Path, *names: str) -> list[dict[str, str]]:
    run_script(SCRIPT, [str(collectives.WORLD), str(folder / "rendezvous"), str(folder / "results"), *names])
    return [pickle.loads(Path(f"{folder / 'results'}{rank}").read_bytes()) for rank in range(collectives.WORLD)]


@pytest.mark.parametrize("name", cases(collectives.CASES, {"gather_scatter_and_exchange": "TorchDynamo does not trace a collective"}))
def test_as_in_eager(name: str, found: list[dict[str, str]]) -> None:
    errors = [error for of_rank in found if (error := of_rank[name])]
    assert not errors, "\n".join(errors)


@pytest.mark.slow
def test_a_hundred_thousand_collectives(tmp_path: Path) -> None:
    """A hundred in a program, which nothing but their order in the graph orders: a thousand calls, four threads, random delays."""
    assert [found["many_independent"] for found in run(tmp_path, "many_independent")] == ["", ""]
