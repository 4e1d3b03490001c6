"""Tests of `python -m benchmarks cpu`: its parts, and the tables of results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import cpu, suites
from dynaxla.bench.engines import BenchEngine
from dynaxla.bench.measure import BenchSettings
from dynaxla.bench.runner import ModelSetup
from dynaxla.cli import app


def invoke(output: Path, *arguments: str) -> Any:
    """Runs the command and returns all measurements up to now."""
    result = CliRunner().invoke(app, ["bench-cpu", *arguments, "--output", str(output)])
    assert result.exit_code == 0, result.output
    return json.loads((output / "cpu.json").read_text())


@pytest.mark.thorough
def test_parts_can_be_measured_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two engines each, because Inductor would call a C++ compiler (see test_engines.py)."""
    for name in ("small", "functions"):
        monkeypatch.setitem(cpu.PARTS, name, replace(cpu.PARTS[name], engines=("eager", "dynaxla")))
    small = invoke(tmp_path, "small", "--models", "mlp_2", "--seconds", "0")
    rows = small["small"]["models"]["mlp_2"]
    assert set(rows) == {"eager", "dynaxla"}
    assert all(row["good"] and row["ms"] > 0 for row in rows.values())
    text = (tmp_path / "cpu.md").read_text()
    assert "## Small models" in text
    assert f"{rows['eager']['ms'] / rows['dynaxla']['ms']:.2f}" in text
    both = invoke(tmp_path, "functions", "--models", "tanh", "--seconds", "0")
    assert both.keys() == {"small", "functions"}
    assert both["small"] == small["small"]
    assert set(both["functions"]["models"]["tanh"]) == {"eager", "dynaxla"}
    assert "## Small models" in (tmp_path / "cpu.md").read_text()
    assert "| tanh |" in (tmp_path / "cpu.md").read_text()


def test_interrupted_long_part_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are measured one by one, and stored until all are measured."""
    measured: list[str] = []

    def as_part(model: str) -> dict[str, Any]:
        if len(measured) == 1:
            measured.append("stopped")
            return {"models": {}}  # as after Ctrl-C
        measured.append(model)
        engines = {engine: {"good": True, "ms": 1.5, "lower": 1.0, "upper": 2.0} for engine in cpu.OTHERS}
        return {"models": {model: engines}}

    monkeypatch.setattr(cpu, "measure_part", lambda part, models, seconds: models[0])
    monkeypatch.setattr(cpu, "as_part", as_part)
    arguments = ["training-others", "--models", "lcnet_050,ElectraModel"]
    assert CliRunner().invoke(app, ["bench-cpu", *arguments, "--output", str(tmp_path)]).exit_code
    assert invoke(tmp_path, *arguments)["training-others"]["models"].keys() == {"lcnet_050", "ElectraModel"}
    assert measured == ["lcnet_050", "stopped", "ElectraModel"]
    assert not list(tmp_path.glob("unfinished*"))


@pytest.mark.parametrize("name", cpu.PARTS)
def test_part_is_measured_with_its_own_settings(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(cases: list[suites.BenchCase], engines: list[BenchEngine], settings: BenchSettings, suite: str) -> str:
        seen.update(cases=[case.name for case in cases], engines=[engine.name for engine in engines], settings=settings, suite=suite)
        return "a report"

    monkeypatch.setattr(cpu, "run", run)
    part = cpu.PARTS[name]
    model = part.chosen([])[-1].name
    assert cpu.measure_part(part, [model], 1.5) == "a report"
    assert (seen["cases"], seen["suite"], sorted(seen["engines"])) == ([model], part.suite, sorted(part.engines))
    settings = seen["settings"]
    assert (settings.iterations_per_run, settings.seconds) == (part.calls, 1.5)
    assert settings.setup == ModelSetup(part.batch, part.dtype, threads=part.threads, training=part.training)


def test_parts_choose_their_cases() -> None:
    steps, rows = (cpu.PARTS[name].chosen([]) for name in ("generation", "generation-row"))
    assert [*rows, *steps] == suites.GENERATION
    assert cpu.PARTS["generation-row"].chosen(["layer_256", "row_256"]) == rows[:1]
    assert cpu.PARTS["small"].chosen([]) == suites.SMALL


def test_first_calls_begin_with_empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is reused only by "dynaxla again". (test_first_call.py measures.)"""
    seconds = {"dynaxla": (3.0, 0.75), "dynamo_aot": (2.0, 0.0), "inductor": (12.0, 0.0)}
    seen: list[tuple[str, list[str], bool]] = []
    engines_by_bytecode: dict[str, list[str]] = {}

    def first_calls(engine: str, models: list[str], cache: str, bytecode: str) -> dict[str, dict[str, float]]:
        assert engines_by_bytecode == {bytecode: ["inductor", "dynaxla"]}, "the Python modules of each engine are compiled first"
        again = (Path(cache) / "used").exists()
        (Path(cache) / "used").touch()
        seen.append((engine, models, again))
        total, compiling = seconds[engine]
        return {model: {"cpu": total, "trace": 0.0 if again else compiling, "lower": 0.0, "compile": 0.25} for model in models}

    def start(engine: str, model: str, cache: str, bytecode: str) -> float:
        engines_by_bytecode.setdefault(bytecode, []).append(engine)
        return 0.0

    monkeypatch.setattr(cpu, "first_calls", first_calls)
    monkeypatch.setattr(cpu, "start", start)
    measured = invoke(tmp_path, "first-call", "--models", "squeezenet1_1,resnet18")["first-call"]["seconds"]
    models = ["resnet18", "squeezenet1_1"]
    assert seen == [("dynaxla", models, False), ("dynaxla", models, True), ("dynamo_aot", models, False), ("inductor", models, False)]
    assert list(map(len, engines_by_bytecode.values())) == [2], "all share one directory"
    assert list(measured) == ["dynaxla", "dynaxla again", "dynamo_aot", "inductor"]
    lines = (tmp_path / "cpu.md").read_text().splitlines()
    assert "| resnet18 | 12.00 | 3.00 | 0.250 | 10.00 | 1.000 | 0.100 | 0.250 | 0.25 |" in lines
    assert "| **all** | 24.00 | 6.00 | 0.250 | 20.00 | 2.000 | 0.100 | 0.500 | 0.25 |" in lines


def test_each_engine_and_model_has_its_own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The caches are empty at first. Later starts of the engines alternate; the table has their median. (test_second_start.py measures.)"""
    seen: list[tuple[str, str, int]] = []
    bytecodes = set()
    seconds = {"inductor": [8.0, 9.0, 3.0, 2.0], "dynaxla": [4.0, 1.5, 1.4, 9.0], "eager": [1.0, 0.5, 0.5, 0.5]}

    def start(engine: str, model: str, cache: str, bytecode: str) -> float:
        used = len(list(Path(cache).iterdir()))
        (Path(cache) / f"{engine} {model} {used}").touch()
        assert all(path.name.startswith(f"{engine} {model} ") for path in Path(cache).iterdir()), "the cache of another engine or model"
        bytecodes.add(bytecode)
        seen.append((engine, model, used))
        return seconds[engine][used]

    monkeypatch.setattr(cpu, "start", start)
    invoke(tmp_path, "starts", "--models", "resnet18,decoder_256")
    engines = ["inductor", "dynaxla", "eager"]
    expected = [(engine, "resnet18", 0) for engine in engines]
    expected += [(engine, model, used) for model in ("resnet18", "decoder_256") for used in range(4) for engine in engines]
    assert seen == expected
    assert len(bytecodes) == 1
    lines = (tmp_path / "cpu.md").read_text().splitlines()
    assert "| resnet18 | 8.00 | 3.00 | 4.00 | 1.50 | 0.50 | 0.50 | 0.38 |" in lines
    assert "| **all** | 16.00 | 6.00 | 8.00 | 3.00 | 1.00 | 0.50 | 0.38 |" in lines


def test_starts_of_unknown_model_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench-cpu", "starts", "--models", "nobody", "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "the valid names are:" in result.output


def test_table_has_ratios_of_times() -> None:
    """Ratios are another engine's time over dynaxla's. A failure is in the table, but not in the means."""
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
    incomplete = cpu._table(cpu.PARTS["small"], {"lacks an engine": {name: good[name] for name in ("eager", "dynaxla")}})
    assert incomplete[2].endswith("| not measured | 1 | 3.00 | - |")


@pytest.mark.parametrize("arguments", [["nothing"], ["small", "--models", "nobody"]])
def test_unknown_names_are_refused(arguments: list[str], tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["bench-cpu", *arguments, "--output", str(tmp_path)])
    assert result.exit_code == 2
    assert "the valid names are:" in result.output


def test_memory_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last column: eager mode's peak plus one more copy of the state, minus the compiled step's. (test_peak_memory.py measures.)"""
    peaks = {"eager": 90_000_000, "dynaxla": 100_000_000, "dynaxla_step": 80_000_000}

    def step_memory(engine: str, model: str, batch: int, optimizer: str) -> dict[str, int]:
        assert (model, batch, optimizer) == ("squeezenet1_1", 4, "adamw")
        return {"peak": peaks[engine], "state": 15_000_000}

    monkeypatch.setattr(cpu, "step_memory", step_memory)
    engines = invoke(tmp_path, "training-memory", "--models", "squeezenet1_1")["training-memory"]["bytes"]["squeezenet1_1"]
    assert engines == {engine: {"peak": peak, "state": 15_000_000} for engine, peak in peaks.items()}
    lines = (tmp_path / "cpu.md").read_text().splitlines()
    assert "## Memory of a training step, adamw, float32, batch 4, one thread" in lines
    assert "| squeezenet1_1 | 15 | 90 | 100 | 80 | 25 |" in lines
