"""Collectives run between programs, on torch's own tensors: two processes, each compared with eager mode. See collectives.py."""

from __future__ import annotations

import pickle
import time
from pathlib import Path

import collectives
import pytest
import torch
import torch.multiprocessing as multiprocessing
from patience import PATIENCE

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each process raised, by case."""
    folder: Path = tmp_path_factory.mktemp("group")
    processes = multiprocessing.spawn(collectives.run, (str(folder / "rendezvous"), str(folder / "results")), collectives.WORLD, join=False)
    deadline = time.monotonic() + PATIENCE
    try:
        while not processes.join(timeout=10):
            assert time.monotonic() < deadline, "a process waits for the other one"
    finally:
        for process in processes.processes:
            process.kill()
    return [pickle.loads(Path(f"{folder / 'results'}{rank}").read_bytes()) for rank in range(collectives.WORLD)]


@pytest.mark.parametrize("name", collectives.CASES)
def test_as_in_eager(name: str, found: list[dict[str, str]]) -> None:
    errors = [error for of_rank in found if (error := of_rank[name])]
    assert not errors, "\n".join(errors)
