"""Tests of `dynaxla bench`: its arguments, output files and exit code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import engines, suites
from dynaxla.bench import report
from dynaxla.bench.measure import BenchSettings
from dynaxla.cli.bench import QUICK_SECONDS
from support.fakes import tiny_benchmark
from support.fakes.tiny_benchmark import fail, invoke, wrapped
from support.processes.scripts import run_script
from support.releases import not_in_oldest


@pytest.fixture
def tiny_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    tiny_benchmark.add_suite(monkeypatch)


def test_bench_writes_json_markdown_and_plot(tiny_suite: None, tmp_path: Path) -> None:
    result = invoke("--suite", "tiny", "--engines", "eager,dynaxla,dynaxla_retrace", "--rounds", "2", "--output", str(tmp_path / "new"))
    assert result.exit_code == 0, result.output
    assert "All 3 rows agree with eager." in result.output
    assert "trace at every call" in result.output
    name = "tiny-cpu-batch1-float32"
    assert {file.name for file in (tmp_path / "new").iterdir()} == {f"{name}.{kind}" for kind in ("json", "md", "png")}
    data = json.loads((tmp_path / "new" / f"{name}.json").read_text())
    assert [row["engine"] for row in data["models"][0]["rows"]] == ["eager", "dynaxla", "dynaxla_retrace"]
    assert data["geometric_means"]["eager"] == {"speedup": 1.0, "models": 1}
    assert data["models"][0]["captured"]["captured_share"] == 1.0
    assert {"torch", "jax", "cpu", "date"} <= data["environment"].keys()
    markdown = (tmp_path / "new" / f"{name}.md").read_text()
    assert re.search(r"^\| tiny \| dynaxla \| .* \| yes \|", markdown, re.MULTILINE)
    assert f"![Speed of each engine relative to the baseline]({name}.png)" in markdown
    assert (tmp_path / "new" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_failed_and_wrong_rows_set_the_exit_code(tiny_suite: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tiny_benchmark.add_engine(monkeypatch, wrapped("failing", fail))
    tiny_benchmark.add_engine(monkeypatch, wrapped("wrong", lambda y: y + 1))
    for name, shown in {"failing": "failed: ValueError: out of luck", "wrong": "NO: off by"}.items():
        result = invoke("--suite", "tiny", "--engines", name, "--rounds", "1", "--output", str(tmp_path))
        assert result.exit_code == 1
        assert shown in result.output
        assert "1 of 2 rows failed or disagree" in result.output
        assert shown in (tmp_path / "tiny-cpu-batch1-float32.md").read_text()


@pytest.mark.thorough
@not_in_oldest("storages that can be made without memory")
def test_bench_on_the_device_jax(tmp_path: Path) -> None:
    """In a separate process, because a process cannot disable the device again."""
    run_script(_ON_THE_DEVICE, [str(tmp_path)])
    data = json.loads((tmp_path / "tiny-jax-batch2-float32.json").read_text())
    rows = {row["engine"]: row for row in data["models"][0]["rows"]}
    assert list(rows) == ["eager", "lazy", "dynamo", "dynamo_aot", "dynaxla", "dynaxla_retrace", "eager_native", "dynaxla_native"]
    assert all(row["good"] for row in rows.values()), rows
    assert all(len(row["wall_samples"]) == len(row["amortized_samples"]) == 2 for row in rows.values())
    assert rows["lazy"]["speedup"] == 1.0, "the baseline"
    assert rows["lazy"]["recorded_ops"] == 3, "two layers and the activation between them"
    assert {"record", "lookup", "execute", "wait"} <= rows["lazy"]["call_phases"].keys()
    assert sum(rows["lazy"]["call_phases"].values()) <= max(rows["lazy"]["wall_samples"])
    assert not any(row["recorded_ops"] for row in rows.values() if row["engine"] != "lazy")
    assert [row["engine"] for row in rows.values() if row["traces"] or row["compilations"]] == ["dynaxla_retrace"]
    markdown = (tmp_path / "tiny-jax-batch2-float32.md").read_text()
    assert "| model | dynamo | dynamo, 10 calls per wait | dynamo_aot | dynamo_aot, 10 calls per wait |" in markdown
    assert "**Trace once over lazy mode: " in markdown
    assert re.search(r"^## Lazy mode: phases.*\n\n.*\n.*\n\| tiny \| 3 \|", markdown, re.MULTILINE)
    trained = json.loads((tmp_path / "tiny-training-adamw-jax-batch4-float32.json").read_text())
    rows = {row["engine"]: row for row in trained["models"][0]["rows"]}
    assert list(rows) == ["eager", "lazy", "dynaxla_step"]
    assert all(row["good"] for row in rows.values()), rows
    assert not rows["lazy"]["compilations"], "in the steady state"


_ON_THE_DEVICE = """
import sys
from support.fakes.tiny_benchmark import TINY, invoke, wrapped
from benchmarks import choices, engines, suites
suites.SUITES["tiny"] = [TINY]
choices.SUITES += ("tiny",)
for arguments, known in [
    (("--engines", "inductor"), "unknown engine 'inductor' on the device jax; the valid names are: eager, lazy, dynamo, "),
    (("--baseline", "torchscript"), "unknown engine 'torchscript' on the device jax"),
    (("--memory",), "--memory supports only the devices cpu and cuda"),
]:
    result = invoke("--suite", "tiny", "--device", "jax", *arguments)
    assert result.exit_code == 2 and known in result.output, result.output
result = invoke("--suite", "tiny", "--device", "jax:99")
assert result.exit_code == 2 and "no device 'jax:99'" in result.output, result.output
inference = "eager,lazy,dynamo,dynamo_aot,dynaxla,dynaxla_retrace,eager_native,dynaxla_native"
for more in (
    ["--engines", inference, "--baseline", "lazy", "--batch", "2"],
    ["--training", "--optimizer", "adamw", "--engines", "eager,lazy,dynaxla_step"],
):
    result = invoke("--suite", "tiny", "--device", "jax", "--rounds", "2", "--output", sys.argv[1], *more)
    assert result.exit_code == 0, result.output
for name, change in (("dynamo", lambda y: y.cpu()), ("dynaxla_native", lambda y: y.to("jax"))):
    right = engines.ENGINES[name]
    engines.ENGINES[name] = wrapped(name, change, native=right.native)
    result = invoke("--suite", "tiny", "--device", "jax", "--rounds", "1", "--engines", name)
    engines.ENGINES[name] = right
    shown = "device jax:0, the model is on cpu" if right.native else "device cpu, the model is on jax:0"
    assert result.exit_code == 1 and f"NO: {shown}" in result.output, result.output
"""


@pytest.mark.parametrize(
    ("arguments", "known"),
    [
        (("--models", "resnet19"), "resnet18, resnet50"),
        (("--only", "resnet18,nothing", "--only", "none"), "'none', 'nothing'"),
        (("--suite", "every"), "models, gpu, others, small, functions, generation, breaks"),
        (("--engines", "lazy"), "the engine 'lazy' cannot be used here: it needs --device jax"),
        (("--engines", "dynaxla_native"), "it needs --device jax"),
        (("--engines", "tensorrt"), "eager, lazy, inductor, torchscript"),
        (("--engines", "torch_xla"), "torch_xla is not installed"),
        (("--baseline", "speed"), "eager, lazy, inductor"),
        (("--dtype", "float8"), "float32, bfloat16, float16, float64"),
        (("--device", "abacus"), "cpu, cuda, cuda:N, jax"),
        (("--device", "meta"), "cpu, cuda"),
        (("--device", "cuda:99"), "CUDA devices"),
        (("--output", "/dev/null/here"), "cannot write"),
    ],
)
def test_invalid_arguments_are_refused(arguments: tuple[str, ...], known: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_benchmark.measure_with(monkeypatch, None)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert known in result.output


def test_arguments_choose_cases_engines_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that measures nothing fails."""
    runs: list[tuple[list[str], list[str], BenchSettings]] = []

    def run(
        cases: list[suites.BenchCase], chosen: list[engines.BenchEngine], settings: BenchSettings, suite: str, _: object
    ) -> report.BenchReport:
        runs.append(([case.name for case in cases], [engine.name for engine in chosen], settings))
        return report.BenchReport(suite, settings, [])

    tiny_benchmark.measure_with(monkeypatch, run)
    for arguments in (
        ["--suite", "small"],
        ["--suite", "small", "--quick", "--training"],
        [
            "--suite",
            "small",
            "--only",
            "mlp_50",
            "--engines",
            "dynaxla",
            "--baseline",
            "inductor",
            "--seconds",
            "0",
            "--training",
            "--batch",
            "3",
        ],
    ):
        assert invoke(*arguments).exit_code == 1, arguments
    (usual, quick, chosen) = runs
    assert usual[0] == [case.name for case in suites.SMALL]
    assert (usual[2].seconds, usual[2].setup.batch, usual[2].setup.training) == (BenchSettings.seconds, 1, "")
    assert quick[0] == suites.QUICK["small"]
    assert (quick[2].seconds, quick[2].setup.batch, quick[2].setup.training) == (QUICK_SECONDS, 4, "sgd")
    assert chosen[:2] == (["mlp_50"], ["inductor", "dynaxla"])
    assert (chosen[2].seconds, chosen[2].setup.batch, chosen[2].baseline) == (0.0, 3, "inductor")
