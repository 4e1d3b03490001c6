"""Tests of `python -m benchmarks cpu processes`."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import two_processes
from dynaxla.bench.benchmark_error import BenchmarkError

ROUNDS = {"eager": [4.0, 5.0], "inductor": [3.0, 3.0], "dynaxla": [2.0, 1.0], "dynaxla_step": [1.0, 2.0]}


def measurements(slower: float = 0.0, **losses: float) -> dict[str, dict[str, Any]]:
    return {
        engine: {
            "ms": [ms + slower for ms in times],
            "first": 8.0 if engine == "inductor" else 2.0 + slower,
            "losses": [losses.get(engine, 0.5)],
        }
        for engine, times in ROUNDS.items()
    }


def test_row_has_the_times_of_the_slower_process() -> None:
    row = two_processes.combined("FSDP2", [measurements(), measurements(slower=1.0)])
    assert {engine: entry["ms"] for engine, entry in row.items()} == {"eager": 5.5, "inductor": 4.0, "dynaxla": 2.5, "dynaxla_step": 2.5}
    assert row["dynaxla"]["first"] == 3.0
    assert "| FSDP2 | 5.5 | 4 | 2.5 | 2.5 | 1.60 | 1.60 | 8.00 | 3.00 | 3.00 | 0.38 |" in two_processes.table({"FSDP2": row})


def test_engine_with_other_losses_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match="FSDP2, inductor: the losses"):
        two_processes.combined("FSDP2", [measurements(), measurements(inductor=0.6)])


@pytest.mark.slow
@pytest.mark.parametrize("way", two_processes.WAYS)
def test_measurement_in_two_processes(way: str) -> None:
    row = two_processes._together(way)
    assert row.keys() == {*two_processes.ENGINES}
    assert all(entry["ms"] > 0 and entry["first"] > 0 for entry in row.values())
