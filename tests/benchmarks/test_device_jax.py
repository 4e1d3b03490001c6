"""Tests of `python -m benchmarks device`: interrupted runs, tables and refused arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import device_jax, suites
from dynaxla.cli import app
from support.processes.scripts import run_script
from support.releases import not_in_oldest

ENVIRONMENT = {"date": "2026-11-23 10:00 UTC", "python": "3.12", "torch": "2.13.0", "jax": "0.10.2", "cpu": "16 cores"}
CAPTURED = {
    "graphs": 1, "graph_calls": 1, "ops_per_graph": 69.0, "largest_graph": 69, "eager_ops": 69, "captured_share": 1.0, "breaks": {},
}  # fmt: skip


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench-device", *arguments])


class FakeMeasurements:
    """Replaces measurements. The milliseconds of an engine are those in `times`, or 2."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, str]] = []
        self.failing: set[str] = set()
        self.times: dict[str, float] = {}
        monkeypatch.setattr(device_jax, "measure_model", self)
        monkeypatch.setattr(device_jax, "warm_up_engines", lambda *_: None)
        monkeypatch.setattr(device_jax, "_engines", lambda part: [])
        monkeypatch.setattr(device_jax, "check_device", self.device)

    def device(self, name: str, threads: int) -> Any:
        assert threads == 1
        return type("Device", (), {"type": name.partition(":")[0]})()

    def __call__(self, part: device_jax.Part, case: suites.BenchCase, device: torch.device, seconds: float) -> dict[str, Any]:
        self.asked.append((part.title, case.name))
        rows = {name: self._row(self.times.get(name, 2.0)) for name in part.engines}
        if case.name in self.failing:
            rows["dynaxla"] = {"good": False, "failure": "out of luck"}
        return {"environment": ENVIRONMENT, "captured": None if part.training else CAPTURED, "engines": rows}

    def _row(self, ms: float) -> dict[str, Any]:
        phases = {"record": 0.5, "lookup": 0.25, "execute": 0.125, "wait": 1.0}
        return {
            "good": True, "ms": ms, "lower": 0.9 * ms, "upper": 1.1 * ms, "cpu_ms": ms / 2, "amortized_ms": ms / 4, "first_call": 4.26,
            "phases": phases, "recorded_ops": 50.0, "compilations": 0, "traces": 0, "error": 1e-7,
        }  # fmt: skip


def test_interrupted_run_continues(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeMeasurements(monkeypatch)
    fake.times = {"lazy": 3.0, "dynaxla_retrace": 8.0, "eager": 5.0, "dynaxla_native": 1.0, "dynamo": 10.0}
    arguments = ["inference", "--models", "resnet18,alexnet", "--output", str(tmp_path)]
    first = invoke(*arguments, "--minutes", "0")
    assert first.exit_code == 1
    assert "1 of 2 are still to be measured" in first.output
    assert set(json.loads((tmp_path / "device.json").read_text())["inference"]) == {"resnet18"}
    second = invoke(*arguments, "--minutes", "0")
    assert second.exit_code == 0, second.output
    assert fake.asked == [("Inference", "resnet18"), ("Inference", "alexnet")]
    text = (tmp_path / "device.md").read_text()
    assert "2026-11-23; python 3.12, torch 2.13.0, jax 0.10.2; 16 cores." in text
    assert "All 16 rows agree with the CPU's eager mode." in text
    for wall, row in ((1.0, "5 | 3 | 10 | 2 | 2 | 8 | 2 | 1"), (0.5, "2.5 | 1.5 | 5 | 1 | 1 | 4 | 1 | 0.5")):
        assert text.count(f"| {row} | 1.50 | 4.00 | 2.50 | 2.00 |") == 2, wall
    assert text.count("| 50 | 0.500 | 10.0 | 0.250 | 0.125 | 1.000 | 3.000 | 0 |") == 2
    assert text.count("| 0.500 | 0.500 | 2.500 | 2.500 |") == 2, "capture alone, relative to eager mode"
    assert text.count("| 1 | 1 | 69.0 | 69 | 69 | 100.0% | 0 |") == 2
    assert "2.7…3.3; 4.3 s" in text
    invoke(*arguments)
    assert len(fake.asked) == 2, "a finished measurement ran again"


def test_training_has_no_captured_graphs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    FakeMeasurements(monkeypatch)
    result = invoke("training-sgd", "--models", "resnet18", "--output", str(tmp_path))
    assert result.exit_code == 0, result.output
    text = (tmp_path / "device.md").read_text()
    assert "## Whole training steps with SGD" in text
    assert "lazy / dynaxla_step |" in text
    assert "captures" not in text


def test_failing_engine_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake = FakeMeasurements(monkeypatch)
    fake.failing = {"resnet18"}
    assert invoke("inference", "--models", "resnet18,alexnet", "--output", str(tmp_path)).exit_code == 1
    text = (tmp_path / "device.md").read_text()
    assert "1 of 16 rows failed or disagree with eager." in text
    assert "| failed: out of luck |" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "the valid names are: inference, forward-backward, training-sgd"),
        (["inference", "--models", "nobody"], "the valid names are: resnet18"),
        (["inference", "--output", "/dev/null/x"], "cannot write"),
        (["inference", "--device", "cpu"], "not of 'cpu'"),
    ],
)
def test_invalid_arguments_are_refused(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeMeasurements(monkeypatch)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert not fake.asked


@pytest.mark.thorough
@not_in_oldest("storages that can be made without memory")
def test_measurement_of_a_tiny_model(tmp_path: Path) -> None:
    """In a separate process, because a process cannot disable the device again."""
    run_script(_MEASURE, [str(tmp_path)])
    results = json.loads((tmp_path / "device.json").read_text())
    for name in ("inference", "forward-backward"):
        part = device_jax.PARTS[name]
        measured = results[name]["tiny"]
        rows = measured["engines"]
        assert set(rows) == set(part.engines)
        assert all(row["good"] and 0 < row["lower"] <= row["ms"] <= row["upper"] for row in rows.values()), rows
        assert rows["lazy"]["recorded_ops"] >= 3
        assert not rows["lazy"]["compilations"]
        assert (measured["captured"] is None) == bool(part.training)
        assert (rows["lazy"]["amortized_ms"] is None) == bool(part.training)
    text = (tmp_path / "device.md").read_text()
    assert len(re.findall("All 8 rows agree", text)) == 2


_MEASURE = """
import sys
from support.fakes.tiny_benchmark import TINY
from typer.testing import CliRunner
from benchmarks import suites
from dynaxla.cli import app
suites.SUITES["models"] = [TINY]
done = CliRunner().invoke(app, ["bench-device", "inference", "forward-backward", "--seconds", "0", "--output", sys.argv[1]])
assert done.exit_code == 0, (done.output, done.exception)
"""
