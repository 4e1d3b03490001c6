"""Tests of the benchmark of a model called with many lengths."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.__main__ import app
from benchmarks.cells import Cells
from benchmarks.lengths import Case, Run, Times
from typer.testing import CliRunner

from benchmarks import lengths


def test_lengths_are_distinct_and_length_1_is_second() -> None:
    all_lengths = lengths.lengths(100)
    assert all_lengths.index(1) == 1
    assert len({*all_lengths}) == 100
    assert max(all_lengths) <= lengths.LONGEST


def a_run(seconds: list[float], cpu: float = 4.0, disagreement: str = "", eager: float = 1.0) -> Run:
    """Returns a run with these times in both rounds."""
    times, other = Times(seconds, [value / 2 for value in seconds]), Times([eager] * len(seconds), [eager / 2] * len(seconds))
    return Run(times, times, other, cpu, 7, disagreement)


def test_each_engine_has_its_own_process_and_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    processes: list[tuple[list[str], str]] = []

    def run(command: list[str], env: dict[str, str], check: bool, **_: Any) -> subprocess.CompletedProcess[str]:
        assert check, "a failure must not be a measurement"
        cache = Path(env["TORCHINDUCTOR_CACHE_DIR"])
        assert (cache / "dynaxla", []) == (Path(env["DYNAXLA_CACHE"]), list(cache.iterdir()))
        processes.append((command[1:], str(cache)))
        return subprocess.CompletedProcess(command, 0, json.dumps(asdict(a_run([1.0, 2.0]))) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    runs = lengths.runs(["bert"], Cells(None, {}))
    assert Run.of(runs["bert"]["dynaxla"]) == a_run([1.0, 2.0])
    assert [command for command, _ in processes] == [["-m", "benchmarks.lengths", engine, "bert"] for engine in lengths.ENGINES]
    assert len({cache for _, cache in processes}) == len(processes)


def test_first_calls_count_neither_for_the_median_nor_as_slow() -> None:
    run = a_run([9.0] * 10 + [1.0, 3.5, 2.0])
    assert (run.slow(), run.median, run.total) == ([3.5], 2.0, 96.5)
    assert lengths.ratio(run.first.wall, run.eager.wall) == lengths.ratio(run.first.cpu, run.eager.cpu) == 2.0


@pytest.mark.parametrize("disagreement", ["", "length 7: dtype"])
def test_table_of_bench_cpu(disagreement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"eager": 1.0, "inductor": 2.0}

    def measure(engine: str, case: str) -> Run:
        taken = seconds.get(engine, 3.5)
        return a_run([taken] * 12, 3 * taken, disagreement)

    monkeypatch.setattr(lengths, "measure", measure)
    result = CliRunner().invoke(app, ["cpu", "lengths", "--models", "gpt_block", "--output", str(tmp_path)])
    assert result.exit_code == bool(disagreement), result.output
    lines = (tmp_path / "cpu.md").read_text().splitlines()
    agreement = disagreement or "as eager's"
    assert f"| gpt_block | dynaxla_both | 42.00 | 1.75 | 10.50 | 1.75 | 3500.0 | 3.50 | 3.50 | 2, 3.50 | 3.50 | 7 | {agreement} |" in lines
    assert f"| gpt_block | inductor | 24.00 | 1.00 | 6.00 | 1.00 | 2000.0 | 2.00 | 2.00 | 0 | 2.00 |  | {agreement} |" in lines
    assert "## Many lengths, float32, batch 1, one thread" in lines


def test_unknown_model_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["cpu", "lengths", "--models", "nobody", "--output", str(tmp_path)])
    assert (result.exit_code, "the valid names are: encoder" in result.output) == (2, True)


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = torch.nn.Embedding(lengths.VOCABULARY, 4), torch.nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(tokens)).softmax(1)


def wrong(graph: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    def call(*inputs: Any) -> Any:
        return [result * (1 + 0.1 * (result.shape[1] > 5)) for result in graph(*inputs)]

    return call


@pytest.mark.usefixtures("quick_xla")
@pytest.mark.parametrize("optimizer", ["", "sgd"])
def test_wrong_results_are_reported(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    """The engine `wrong` gives wrong results for all lengths after the first."""
    monkeypatch.setattr(lengths, "lengths", lambda count: [5, 6, 7][:count])
    monkeypatch.setitem(lengths.CASES, "tiny", Case(Tiny, optimizer, 3))
    monkeypatch.setitem(lengths.ENGINES, "wrong", {"backend": wrong})
    measured = lengths._measure("dynaxla_both", "tiny")
    assert measured["disagreement"] == ""
    assert {len(times) for name in ("first", "again", "eager") for times in measured[name].values()} == {3}
    assert measured["executables"] >= (4 if optimizer else 2)
    assert measured["cpu"] > 0
    assert lengths._measure("wrong", "tiny")["disagreement"].startswith("length 6: ")
