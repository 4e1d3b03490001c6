"""Collectives of XLA between processes (distributed="xla"), compared with eager mode by cases/processes/xla_collectives.py."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dynaxla
from cases.processes import failing_processes, xla_collectives
from support.processes.fork_server import found_here
from support.processes.scripts import run_script
from support.processes.time_limits import PATIENCE

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)

EVERY = xla_collectives.QUICK | xla_collectives.WHOLE

SCRIPT = """
import sys
from torch.multiprocessing import start_processes

def run(rank, *places):
    from cases.processes import xla_collectives
    xla_collectives.run(rank, *places)

start_processes(run, tuple(sys.argv[1:]), int(sys.argv[1]), start_method="fork")
"""


def run(folder: Path, world: int, *names: str) -> list[dict[str, str]]:
    """What each process raised, by case."""
    run_script(SCRIPT, [str(world), str(folder / "rendezvous"), str(folder / "results"), *names])
    return [pickle.loads(Path(f"{folder / 'results'}{rank}").read_bytes()) for rank in range(world)]


def check(found: list[dict[str, str]], name: str) -> None:
    errors = [error for of_rank in found if (error := of_rank[name])]
    assert not errors, "\n".join(errors)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(tmp_path_factory.mktemp("two"), 2, *xla_collectives.QUICK)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(tmp_path_factory.mktemp("four"), 4, *EVERY)


@pytest.fixture(scope="module")
def two_slowly(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(tmp_path_factory.mktemp("two"), 2, *xla_collectives.WHOLE)


@pytest.mark.parametrize("name", xla_collectives.QUICK)
def test_two_processes(name: str, two: list[dict[str, str]]) -> None:
    check(two, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", xla_collectives.WHOLE)
def test_two_processes_at_length(name: str, two_slowly: list[dict[str, str]]) -> None:
    check(two_slowly, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_four_processes(name: str, four: list[dict[str, str]]) -> None:
    check(four, name)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", xla_collectives.SLOW)
def test_longer_ones(name: str, world: int, tmp_path: Path) -> None:
    check(run(tmp_path, world, name), name)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", ["dies", "hangs", "differs", "again", "first ends first", "last ends first"])
def test_what_becomes_of_the_others(case: str, world: int, tmp_path: Path) -> None:
    places = [f"file://{tmp_path / name}" for name in ("first", "second")]
    started = [
        subprocess.Popen(
            [sys.executable, failing_processes.__file__, case, str(rank), str(world), *places],
            env=found_here(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = [process.communicate(timeout=PATIENCE)[1] for process in started]
    ends = [0] * (world - 1) + [-signal.SIGKILL if case == "dies" else 0]
    assert [process.returncode for process in started] == ends, "\n".join(text[-2000:] for text in said)


def test_a_value_that_is_none() -> None:
    with pytest.raises(dynaxla.errors.OptionError, match="distributed is 'torch', 'xla' or 'spmd'"):
        torch.compile(lambda x: x + 1, backend="dynaxla", options={"distributed": "nccl"})(torch.ones(2))
