"""Tests of `make gpu` on the CPU: every part runs, and a crash or a hang costs one test or one part."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commands.gpu_report import __main__ as command
from commands.gpu_report import environment, runs
from commands.gpu_report.facts import DEVICE_VARIABLE, FILE_VARIABLE, START_VARIABLE, read
from commands.gpu_report.runs import RUNS, Run, pytest_line
from support.paths import ROOT


def report(output: Path, *arguments: str, **variables: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Runs the report on the CPU as `make gpu` does, and returns its process and its facts."""
    path = os.pathsep.join(str(ROOT / name) for name in ("src", "tests"))
    line = [sys.executable, "-m", "commands.gpu_report", "--device", "cpu", "--output", str(output), *arguments]
    process = subprocess.run(line, env={**os.environ, **variables, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
    return process, [json.loads(fact) for fact in (output / "facts.jsonl").read_text().splitlines()]


PARTS = [run.name for run in RUNS if not run.is_tests]
NETWORKS = [name for name in PARTS if name.startswith("resnet")]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "parts", [[name for name in PARTS if name not in NETWORKS], pytest.param(NETWORKS, marks=pytest.mark.slow)], ids=["parts", "networks"]
)
def test_all_parts_run(tmp_path: Path, parts: list[str]) -> None:
    process, facts = report(tmp_path, "--minutes", "8", "--jobs", "2", "--only", ",".join(parts))
    bad = [fact for fact in facts if not fact.get("ok", True)]
    assert not bad, (bad, (tmp_path / "log.txt").read_text()[-3000:])
    assert process.returncode == 0, process.stdout + process.stderr
    ran = {fact["what"] for fact in facts if fact["part"] == "driver"}
    assert ran == {"start", *parts}
    without_facts_on_a_cpu = {"graph_capture", "out_of_memory"}
    assert {fact["part"] for fact in facts} == {"driver", *parts} - without_facts_on_a_cpu
    assert len(process.stdout.splitlines()) <= command.SUMMARY_LINES


TESTS = """
import os, time

def test_first():
    pass

def test_crash():
    os.abort()

def test_failure():
    assert 1 == 2, "one is not two"

def test_hang():
    time.sleep(100)
"""


@pytest.mark.thorough
def test_crash_costs_one_test_and_hang_ends_at_the_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The facts of finished tests are stored. To save time, the limit of two minutes is simulated: it ends as soon as the test hangs."""
    (tmp_path / "test_cuda.py").write_text(TESTS)
    output = tmp_path / "output"

    class ShortWait(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None or timeout <= runs.GRACE:
                return super().wait(timeout)
            assert timeout <= 120
            end = time.monotonic() + timeout
            while "test_hang" not in (output / "facts.jsonl").read_text() and time.monotonic() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return super().wait(0.1)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(runs.subprocess, "Popen", ShortWait)
    for name in (FILE_VARIABLE, START_VARIABLE, DEVICE_VARIABLE):
        monkeypatch.setenv(name, "")  # the driver changes them, and monkeypatch restores them
    code = command.main(["--device", "cpu", "--output", str(output), "--minutes", "2", "--only", "test_cuda.py", "--tests", str(tmp_path)])
    assert code == 1
    printed = capfd.readouterr().out
    facts = read(output / "facts.jsonl")
    outcomes = {fact["id"].rpartition("::")[2]: fact["outcome"] for fact in facts if "outcome" in fact}
    assert outcomes == {"test_first": "passed", "test_failure": "failed"}
    assert "one is not two" in printed
    for name in ("test_crash", "test_hang"):
        assert f"test_cuda.py::{name}" in printed
    assert printed.count("began and did not end: ") == 2
    (end,) = (fact for fact in facts if fact["part"] == "driver" and fact["what"] == "test_cuda.py")
    assert end["exit"] == "stopped at its time limit"
    assert "Fatal Python error: Aborted" in (output / "log.txt").read_text()


def test_missing_packages_are_reported(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("jax", "pytest") else find(name))
    assert command.main([]) == 2
    printed = capfd.readouterr().out
    assert "jax is missing, which dynaxla needs: pip install jax\n" in printed
    assert "pytest is missing, which its tests need: pip install pytest\n" in printed
    assert printed.count("missing:") == 2


def test_backend_is_found_without_an_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    installed = importlib.metadata.entry_points(group="torch_dynamo_backends")
    expected = {(point.name, point.value) for point in installed if point.name.startswith("dynaxla")}
    monkeypatch.setattr(importlib.metadata, "version", version)
    variables = environment.variables(tmp_path, {"PYTHONPATH": "/elsewhere", "DYNAXLA_CACHE": "/earlier", "HOME": "/root"})
    *path, metadata, before = variables["PYTHONPATH"].split(os.pathsep)
    assert path == [str(ROOT / "src"), str(ROOT / "tests")]
    assert (metadata, before) == (str(tmp_path / "metadata"), "/elsewhere")
    assert variables["DYNAXLA_CACHE"] == ""
    assert variables["HOME"] == "/root"
    (distribution,) = importlib.metadata.distributions(path=[metadata])
    points = distribution.entry_points.select(group="torch_dynamo_backends")
    assert {(point.name, point.value) for point in points} == expected


def test_processes_share_caches_that_are_empty_at_first(tmp_path: Path) -> None:
    variables = environment.variables(tmp_path, {"XLA_FLAGS": "--first"})
    assert variables["XLA_FLAGS"] == f"--first --xla_gpu_per_fusion_autotune_cache_dir={tmp_path / 'autotuned'}"
    assert variables["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "compiled")
    assert all(list(path.iterdir()) == [] for path in (tmp_path / "autotuned", tmp_path / "compiled"))


def test_all_files_of_gpu_tests_are_listed_with_attention_last() -> None:
    files = {file.name for file in (ROOT / "tests" / "gpu").glob("test_*.py")}
    listed = [run.name for run in RUNS if run.is_tests]
    assert set(listed) == files
    assert listed[0] == "test_cuda.py"
    assert listed[-1] == "test_cuda_attention.py"


@pytest.mark.thorough
def test_pytest_runs_without_pytest_timeout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text("def test_it():\n    pass\n")
    monkeypatch.setattr(environment, "has", lambda module: False)
    line = [*pytest_line(file), "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:timeout"]
    variables = {"GPU_REPORT_FILE": str(tmp_path / "facts"), "GPU_REPORT_START": "0", "PYTHONPATH": str(ROOT / "tests")}
    process = subprocess.run(line, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "1 passed" in process.stdout


def test_summary_is_short_and_has_failed_tests() -> None:
    facts = [{"part": "add", "what": f"fact {i}", "ok": i % 2 == 0, "traceback": "x" * 1000} for i in range(200)]
    facts.append(
        {"part": "pytest", "what": "test ends", "id": "a::b", "outcome": "failed", "error": "somewhere\nE   first line\nE   last line"}
    )
    lines = command.summary(facts)
    assert len(lines) == command.SUMMARY_LINES
    assert all(len(line) <= command.SUMMARY_WIDTH for line in lines)
    assert lines[-1] == "tests: {'failed': 1}"
    assert command.summary(facts[-1:])[0] == "failed: a::b: first line"
    assert not Run("add", 1).is_tests
