"""Tests of graphs with DTensors whose collectives XLA's partitioner chooses (`options={"distributed": "spmd"}`).

Such graphs have the ops dynaxla.reshard, replicated_to_local and local_to_replicated. See tests/cases/processes/partitioned.py.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import dynaxla
from cases.processes import partitioned
from support import releases
from support.processes.scripts import run_script
from support.timing import quick_compilation

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)

SCRIPT = """
import sys
from torch.multiprocessing import start_processes

def run(rank, *places):
    from cases.processes import partitioned
    partitioned.run(rank, *places)

start_processes(run, tuple(sys.argv[1:]), int(sys.argv[1]), start_method="fork")
"""


def run(folder: Path, world: int, *names: str) -> list[dict[str, str]]:
    """Returns each process's errors, by case."""
    run_script(SCRIPT, [str(world), str(folder / "rendezvous"), str(folder / "results"), *names], XLA_FLAGS=quick_compilation.flags())
    return [pickle.loads(Path(f"{folder / 'results'}{rank}").read_bytes()) for rank in range(world)]


def check(errors_by_process: list[dict[str, str]], name: str) -> None:
    messages = [error for errors_by_case in errors_by_process if (error := errors_by_case[name])]
    assert not messages, "\n".join(messages)


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(tmp_path_factory.mktemp("two"), 2, *partitioned.QUICK)


@pytest.fixture(scope="module")
def two_processes_slow_cases(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(tmp_path_factory.mktemp("two"), 2, *partitioned.SLOW)


@pytest.fixture(scope="module")
def four_processes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return run(tmp_path_factory.mktemp("four"), 4, *partitioned.QUICK, *partitioned.SLOW, *partitioned.FOUR)


@pytest.mark.parametrize(
    "name", releases.cases(partitioned.QUICK, {"a_megatron_mlp": "its graph of a parallel layer has DTensors and plain tensors"})
)
def test_two_processes(name: str, two_processes: list[dict[str, str]]) -> None:
    check(two_processes, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", partitioned.SLOW)
def test_two_processes_slow_cases(name: str, two_processes_slow_cases: list[dict[str, str]]) -> None:
    check(two_processes_slow_cases, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*partitioned.QUICK, *partitioned.SLOW, *partitioned.FOUR])
def test_four_processes(name: str, four_processes: list[dict[str, str]]) -> None:
    check(four_processes, name)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"distributed": "shardy"}, "distributed is 'torch', 'xla' or 'spmd'"),
        ({"distributed": "spmd", "freeze": True}, "together with freeze=True"),
        ({"distributed": "spmd", "compile": "background"}, "together with compile='background'"),
    ],
)
def test_invalid_and_excluded_options_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises(dynaxla.errors.OptionError, match=match):
        torch.compile(lambda x: x + 1, backend="dynaxla", options=options)(torch.ones(2))


def test_option_spmd_of_a_step_is_refused() -> None:
    with pytest.raises(dynaxla.errors.OptionError, match="distributed='spmd'"):
        dynaxla.compile_step(lambda x: x + 1, options={"distributed": "spmd"})


def test_graph_without_dtensors_is_not_partitioned() -> None:
    before = dynaxla.metrics.snapshot()
    x = torch.arange(4.0)
    torch.testing.assert_close(torch.compile(lambda x: x.sin() + 1, backend="dynaxla", options={"distributed": "spmd"})(x), x.sin() + 1)
    after = dynaxla.metrics.snapshot()
    assert all(after.get(name, 0) == before.get(name, 0) for name in ("partitioned", "not_partitioned"))
