"""A model called with many lengths: which, what is counted, and that a wrong result is seen."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import lengths
from benchmarks.cells import Cells
from benchmarks.lengths import Case, Run
from dynaxla.cli import app


def test_all_lengths_differ_and_the_graph_of_length_1_comes_early() -> None:
    found = lengths.lengths()
    assert found.index(1) == 1
    assert len({*found}) == lengths.COUNT
    assert max(found) <= lengths.LONGEST


def test_each_engine_has_a_process_and_caches_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[list[str], str]] = []

    def run(command: list[str], env: dict[str, str], check: bool, **_: Any) -> subprocess.CompletedProcess[str]:
        assert check, "a failure must not be a measurement"
        cache = Path(env["TORCHINDUCTOR_CACHE_DIR"])
        assert (cache / "dynaxla", []) == (Path(env["DYNAXLA_CACHE"]), list(cache.iterdir()))
        seen.append((command[1:], str(cache)))
        return subprocess.CompletedProcess(command, 0, '{"calls": [1.0, 2.0], "cpu": 4.0, "executables": 2, "disagreement": ""}\n')

    monkeypatch.setattr(subprocess, "run", run)
    found = lengths.runs(["bert"], Cells(None, {}))
    assert found["bert"]["dynaxla"] == asdict(Run([1.0, 2.0], 4.0, 2, ""))
    assert [command for command, _ in seen] == [["-m", "benchmarks.lengths", engine, "bert"] for engine in lengths.ENGINES]
    assert len({cache for _, cache in seen}) == len(seen)


def test_the_worst_call_is_none_of_the_first() -> None:
    eager, mine = Run([1.0] * 13, 13.0, 0, ""), Run([9.0] * 10 + [1.0, 3.0, 2.0], 0.0, 0, "")
    assert (mine.worst(eager), mine.total) == (3.0, 96.0)


@pytest.mark.parametrize("disagreement", ["", "length 7: dtype"])
def test_the_part_of_bench_cpu(disagreement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {"eager": 1.0, "inductor": 2.0}
    monkeypatch.setattr(
        lengths, "measure", lambda engine, case: Run([seconds.get(engine, 1.5)] * 12, 3 * seconds.get(engine, 1.5), 7, disagreement)
    )
    done = CliRunner().invoke(app, ["bench-cpu", "lengths", "--models", "gpt_block", "--output", str(tmp_path)])
    assert done.exit_code == bool(disagreement), done.output
    lines = (tmp_path / "cpu.md").read_text().splitlines()
    assert f"| gpt_block | dynaxla_both | 18.00 | 0.75 | 4.50 | 0.75 | 1.50 | 7 | {disagreement or 'as eager' + chr(39) + 's'} |" in lines
    assert f"| gpt_block | inductor | 24.00 | 1.00 | 6.00 | 1.00 | 2.00 |  | {disagreement or 'as eager' + chr(39) + 's'} |" in lines
    assert "## Many lengths, float32, batch 1, one thread" in lines


def test_an_unknown_model(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench-cpu", "lengths", "--models", "nobody", "--output", str(tmp_path)])
    assert (done.exit_code, "there are: bert" in done.output) == (2, True)


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
def test_a_run(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    """`wrong` is so with the lengths behind the first."""
    monkeypatch.setattr(lengths, "lengths", lambda: [5, 6, 7])
    monkeypatch.setitem(lengths.CASES, "tiny", Case(Tiny, optimizer))
    monkeypatch.setitem(lengths.ENGINES, "wrong", {"backend": wrong})
    right = lengths._measure("dynaxla_both", "tiny")
    assert (right["disagreement"], len(right["calls"])) == ("", 3)
    assert right["executables"] >= (4 if optimizer else 2)
    assert right["cpu"] > 0
    assert lengths._measure("wrong", "tiny")["disagreement"].startswith("length 6: ")
