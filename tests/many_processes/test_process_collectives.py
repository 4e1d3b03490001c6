"""Tests of XLA's collectives between processes (distributed="xla"); tests/cases/processes/xla_collectives.py compares with eager mode."""

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

ALL_CASES = xla_collectives.QUICK | xla_collectives.WHOLE

SCRIPT = """
import sys
from torch.multiprocessing import start_processes

def run(rank, *places):
    from cases.processes import xla_collectives
    xla_collectives.run(rank, *places)

start_processes(run, tuple(sys.argv[1:]), int(sys.argv[1]), start_method="fork")
"""


def run(folder: Path, world: int, *names: str) -> list[dict[str, str]]:
    """Returns each process's errors, by case."""
    run_script(SCRIPT, [str(world), str(folder / "rendezvous"), str(folder / "results"), *names])
    return [pickle.loads(Path(f"{folder / 'results'}{rank}").read_bytes()) for rank in range(world)]


def check(errors_by_process: list[dict[str, str]], name: str) -> None:
    messages = [error for errors_by_case in errors_by_process if (error := errors_by_case[name])]
    assert not messages, "\n".join(messages)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(tmp_path_factory.mktemp("two"), 2, *xla_collectives.QUICK)


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(tmp_path_factory.mktemp("four"), 4, *ALL_CASES)


@pytest.fixture(scope="module")
def two_processes_slow_cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(tmp_path_factory.mktemp("two"), 2, *xla_collectives.WHOLE)


@pytest.mark.parametrize("name", xla_collectives.QUICK)
def test_two_processes(name: str, two_processes: list[dict[str, str]]) -> None:
    check(two_processes, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", xla_collectives.WHOLE)
def test_two_processes_slow_cases(name: str, two_processes_slow_cases: list[dict[str, str]]) -> None:
    check(two_processes_slow_cases, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL_CASES)
def test_four_processes(name: str, four_processes: list[dict[str, str]]) -> None:
    check(four_processes, name)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", xla_collectives.SLOW)
def test_longest_cases(name: str, world: int, tmp_path: Path) -> None:
    check(run(tmp_path, world, name), name)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("case", ["dies", "hangs", "differs", "again", "first ends first", "last ends first"])
def test_exit_status_of_all_processes(case: str, world: int, tmp_path: Path) -> None:
    rendezvous = [f"file://{tmp_path / name}" for name in ("first", "second")]
    processes = [
        subprocess.Popen(
            [sys.executable, failing_processes.__file__, case, str(rank), str(world), *rendezvous],
            env=found_here(),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    errors = [process.communicate(timeout=PATIENCE)[1] for process in processes]
    expected = [0] * (world - 1) + [-signal.SIGKILL if case == "dies" else 0]
    assert [process.returncode for process in processes] == expected, "\n".join(text[-2000:] for text in errors)


def test_unknown_value_of_distributed_is_refused() -> None:
    with pytest.raises(dynaxla.errors.OptionError, match="distributed is 'torch', 'xla' or 'spmd'"):
        torch.compile(lambda x: x + 1, backend="dynaxla", options={"distributed": "nccl"})(torch.ones(2))
