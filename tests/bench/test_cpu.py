"""`dynaxla bench-cpu`: its tables hold what was measured, and parts can be measured one by one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynaxla.bench import cpu
from dynaxla.cli import app


def test_part_by_part(tmp_path: Path) -> None:
    first = CliRunner().invoke(app, ["bench-cpu", "small", "--models", "mlp_2", "--seconds", "0", "--output", str(tmp_path)])
    assert first.exit_code == 0, first.output
    measured = json.loads((tmp_path / "cpu.json").read_text())
    rows = measured["small"]["models"]["mlp_2"]
    assert set(rows) == {"eager", "inductor", "dynaxla"}
    assert all(row["good"] and row["ms"] > 0 for row in rows.values())
    text = (tmp_path / "cpu.md").read_text()
    assert "## Small models" in text
    assert f"{rows['inductor']['ms'] / rows['dynaxla']['ms']:.2f}" in text
    second = CliRunner().invoke(app, ["bench-cpu", "bfloat16", "--models", "squeezenet1_1", "--seconds", "0", "--output", str(tmp_path)])
    assert second.exit_code == 0, second.output
    assert json.loads((tmp_path / "cpu.json").read_text())["small"] == measured["small"]
    assert "## Small models" in (tmp_path / "cpu.md").read_text()
    assert "squeezenet1_1" in (tmp_path / "cpu.md").read_text()


def test_first_calls(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench-cpu", "first-call", "--models", "squeezenet1_1", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    seconds = json.loads((tmp_path / "cpu.json").read_text())["first-call"]["seconds"]
    assert set(seconds) == {"dynaxla", "dynaxla again", "dynamo_aot", "inductor"}
    mine = seconds["dynaxla"]["squeezenet1_1"]
    assert 0 < mine["trace"] + mine["lower"] + mine["compile"] < mine["cpu"]


def test_ratios() -> None:
    """The other engine's time over dynaxla's; a failure is shown and left out of the means."""
    good = {"eager": {"good": True, "ms": 3.0}, "inductor": {"good": True, "ms": 2.0}, "dynaxla": {"good": True, "ms": 1.0}}
    slow = {**good, "dynaxla": {"good": True, "ms": 4.0}}
    failed = {**good, "inductor": {"good": False, "failure": "no compiler"}}
    lines = cpu._table(cpu.PARTS["small"], {"fast": good, "slow": slow, "failed": failed})
    assert lines[2].endswith("| 3.00 | 2.00 |")
    assert lines[3].endswith("| 0.75 | 0.50 |")
    assert "failed: no compiler" in lines[4]
    assert lines[4].endswith("| 3.00 | - |")
    assert lines[5].endswith("| **1.89** | **1.00** |")
    assert lines[6].endswith("| **0.75** | **0.50** |")
    earlier = cpu._table(cpu.PARTS["small"], {"lacks an engine": {name: good[name] for name in ("eager", "dynaxla")}})
    assert earlier[2].endswith("| not measured | 1 | 3.00 | - |")


@pytest.mark.parametrize("arguments", [["nothing"], ["small", "--models", "nobody"]])
def test_bad_requests(arguments: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["bench-cpu", *arguments, "--output", str(tmp_path)])
    assert done.exit_code == 2
    assert "there are:" in done.output


def test_memory(tmp_path: Path) -> None:
    """Eager mode's step of AdamW holds parameters, gradients and two states; dynaxla's at least as much."""
    done = CliRunner().invoke(app, ["bench-cpu", "training-memory", "--models", "squeezenet1_1", "--output", str(tmp_path)])
    assert done.exit_code == 0, done.output
    engines = json.loads((tmp_path / "cpu.json").read_text())["training-memory"]["bytes"]["squeezenet1_1"]
    assert set(engines) == set(cpu.MEMORY_ENGINES)
    for found in engines.values():
        assert found["state"] == 3 * 4 * 1_235_496
        assert found["peak"] > found["state"] * 4 / 3
    text = (tmp_path / "cpu.md").read_text()
    assert "## Memory of a training step" in text
    assert f"{engines['dynaxla_step']['peak'] / 1e6:.0f}" in text
