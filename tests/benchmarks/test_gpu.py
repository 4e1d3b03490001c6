"""Tests of `python -m benchmarks gpu`: interrupted runs and tables. Measurements are replaced, and the device is the CPU."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu_parts import FIRST, PARTS
from typer.testing import CliRunner

from benchmarks import gpu, gpu_model
from dynaxla.cli import app

ENVIRONMENT = {"date": "2026-11-23 10:00 UTC", "python": "3.12", "torch": "2.11.0", "gpu": "H100", "cpu": "16 cores"}
PART = "float32-batch1"


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench-gpu", *arguments, "--device", "cpu", "--jobs", "1"])


class FakeMeasurements:
    """Replaces measurements. Returns None for models in `late`, as if the time were not sufficient."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, str]] = []
        self.late: set[str] = set()
        self.failing: set[str] = set()
        self.no_time_for_memory = False
        self.memory_of: list[tuple[str, str]] = []
        monkeypatch.setattr(gpu, "measure_times", self.times)
        monkeypatch.setattr(gpu, "measure_memory", self.memory)

    def memory(self, part: str, model: str, engine: str, device: str, seconds: float, end: float, caches: Path) -> dict[str, Any] | None:
        if self.no_time_for_memory:
            return None
        self.memory_of.append((model, engine))
        return {"peak": 5_000_000}

    def times(
        self, part: str, model: str, device: str, seconds: float, end: float, caches: Path, turn: gpu_model.Turn
    ) -> dict[str, Any] | None:
        self.asked.append((part, model))
        if model in self.late:
            return None
        row = {"good": True, "ms": 2.0, "lower": 1.0, "upper": 3.0, "first_call": 4.26}
        rows = {name: dict(row) for name in PARTS[part].engines}
        if model in self.failing:
            rows["dynaxla"] = {"good": False, "failure": "out of luck"}
        return {"environment": ENVIRONMENT, "engines": rows}


def test_interrupted_run_continues(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeMeasurements(monkeypatch)
    fake.late = {"alexnet"}
    arguments = [PART, "--models", "resnet18,alexnet,vgg16", "--output", str(tmp_path)]
    first = invoke(*arguments)
    assert first.exit_code == 1
    assert "2 measurements are left" in first.output
    assert set(json.loads((tmp_path / "gpu.json").read_text())[PART]) == {"resnet18"}
    assert "| resnet18 | 2 | 2 | 2 | 1.00 | 1.00 |" in (tmp_path / "gpu.md").read_text()
    fake.late = set()
    second = invoke(*arguments)
    assert second.exit_code == 0, second.output
    assert fake.asked == [(PART, model) for model in ("resnet18", "alexnet", "alexnet", "vgg16")]
    assert (tmp_path / "gpu.md").read_text().count("| 4.3 | 4.3 | 4.3 | 5 | 5 | 5 |") == 3
    invoke(*arguments)
    assert len(fake.asked) == 4, "a finished measurement ran again"


@pytest.mark.thorough
def test_rows_compile_in_parallel_and_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model that is still compiling near the end of the time is stopped, and left for the next run."""
    timed: list[str] = []
    lock = threading.Lock()

    def times(part: str, model: str, *rest: Any) -> dict[str, Any] | None:
        turn = rest[-1]
        if model == "alexnet":  # never ends compiling
            while not turn.is_stopped:
                time.sleep(0.01)
            return None
        turn.wait()
        assert lock.acquire(blocking=False), "two models are timed at the same time"
        timed.append(model)
        time.sleep(0.3)
        lock.release()
        row = {"good": True, "ms": 2.0, "lower": 1.0, "upper": 3.0, "first_call": 4.26, "peak": 1}
        return {"environment": ENVIRONMENT, "engines": dict.fromkeys(PARTS[part].engines, row)}

    monkeypatch.setattr(gpu, "measure_times", times)
    monkeypatch.setattr(gpu, "_AFTER_ROUNDS", 1.0)
    models = ("resnet18", "alexnet", "vgg16")
    arguments = [PART, "--models", ",".join(models), "--output", str(tmp_path), "--seconds", "0", "--minutes", "0.1", "--jobs", "3"]
    result = CliRunner().invoke(app, ["bench-gpu", *arguments, "--device", "cpu"])
    assert "1 measurements are left" in result.output
    assert timed == ["resnet18", "vgg16"]
    assert set(json.loads((tmp_path / "gpu.json").read_text())[PART]) == set(timed)


def test_times_are_stored_if_no_time_is_left_for_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeMeasurements(monkeypatch)
    fake.no_time_for_memory = True
    arguments = [PART, "--models", "resnet18,vgg16", "--output", str(tmp_path)]
    assert invoke(*arguments).exit_code == 1
    assert (tmp_path / "gpu.md").read_text().count("| 4.3 | 4.3 | 4.3 | - | - | - |") == 2
    fake.no_time_for_memory = False
    assert invoke(*arguments).exit_code == 0
    assert fake.asked == [(PART, "resnet18"), (PART, "vgg16")]
    assert fake.memory_of == [(model, engine) for model in ("resnet18", "vgg16") for engine in PARTS[PART].engines]


@pytest.mark.thorough
def test_most_requested_measurements_run_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeMeasurements(monkeypatch)
    assert invoke("--models", "bert_base,gpt_block,resnet50,vgg16", "--output", str(tmp_path)).exit_code == 0
    assert fake.asked[: len(FIRST)] == FIRST
    assert len(fake.asked) == len(set(fake.asked)) == 4 * len(PARTS)


def test_model_that_exceeds_the_full_time_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeMeasurements(monkeypatch)
    fake.late = {"alexnet"}
    arguments = [PART, "--models", "alexnet,vgg16", "--minutes", "3", "--output", str(tmp_path)]
    assert invoke(*arguments).exit_code == 1
    assert "not done in 3 minutes" in (tmp_path / "gpu.md").read_text()
    assert invoke(*arguments).exit_code == 1
    assert fake.asked[-1] == (PART, "vgg16")
    assert set(json.loads((tmp_path / "gpu.json").read_text())[PART]) == {"alexnet", "vgg16"}


def test_failing_engine_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeMeasurements(monkeypatch)
    fake.failing = {"resnet18"}
    assert invoke(PART, "--models", "resnet18", "--output", str(tmp_path)).exit_code == 1
    text = (tmp_path / "gpu.md").read_text()
    assert "| resnet18 | 2 | 2 | failed: out of luck | - | - |" in text
    assert "| resnet18 | 4.3 | 4.3 | - | 5 | 5 | - |" in text


def test_tables_list_each_date_and_machine_once() -> None:
    def measured(**changed: str) -> dict[str, Any]:
        return {"environment": {**ENVIRONMENT, **changed}, "engines": {}}

    models = {
        "a": measured(),
        "b": measured(date="2026-11-23 11:00 UTC"),
        "c": measured(date="2026-11-24 11:00 UTC"),
        "d": measured(gpu="H200"),
    }
    text = gpu.as_markdown({PART: {**models, "e": {"environment": {}, "engines": {}}}})
    machine = "python 3.12, torch 2.11.0; {}; 16 cores."
    environments = [line for line in text.splitlines() if line.startswith("2026")]
    assert environments == [
        f"2026-11-23; {machine.format('H100')}",
        f"2026-11-23; {machine.format('H200')}",
        f"2026-11-24; {machine.format('H100')}",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "the valid names are: float32-batch1"),
        ([PART, "--models", "nobody"], "the valid names are: resnet18"),
        ([PART, "--output", "/dev/null/x"], "cannot write"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], message: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench-gpu", PART, "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "the number of CUDA devices that torch finds is 0" in result.output
