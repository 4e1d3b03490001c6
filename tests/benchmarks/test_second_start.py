"""Tests of measurements of first calls in processes that use the caches of earlier processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import second_start
from support.processes.scripts import run_script


def test_process_has_its_own_caches_and_one_compile_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    call: dict[str, Any] = {}

    def run(command: list[str], env: dict[str, str], check: bool, **_: Any) -> subprocess.CompletedProcess[str]:
        call.update(command=command, env=env, check=check)
        return subprocess.CompletedProcess(command, 0, "what a compiler says\n1.5\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert second_start.start("inductor", "resnet18", "/a/cache", "/bytecode") == 1.5
    assert call["command"][1:] == ["-m", "benchmarks.second_start", "inductor", "resnet18"]
    assert (call["env"]["DYNAXLA_CACHE"], call["env"]["TORCHINDUCTOR_CACHE_DIR"]) == ("/a/cache/dynaxla", "/a/cache")
    assert call["env"]["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert call["env"]["PYTHONPYCACHEPREFIX"] == "/bytecode"
    assert "PYTHONDONTWRITEBYTECODE" not in call["env"]
    assert call["check"], "a failure must not be a measurement"


def test_process_writes_bytecode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    subprocess.run([sys.executable, "-c", "import json"], env=second_start.environment("", str(tmp_path)), check=True)
    assert list(tmp_path.glob("**/json/__init__.*.pyc"))


def test_measured_first_call_stores_its_graph(tmp_path: Path) -> None:
    seconds = run_script(
        """if True:
            from benchmarks import second_start, suites
            from support.fakes.tiny_benchmark import TINY

            suites.SUITES["models"] = [TINY]
            print(second_start._measure("dynaxla", "tiny"))
        """,
        DYNAXLA_CACHE=str(tmp_path),
    )
    assert float(seconds) > 0
    assert list(tmp_path.glob("graphs/*")), "no graph is stored for a second start"


def test_import_of_the_module_imports_no_compiler() -> None:
    code = "import sys, benchmarks.second_start; print({'jax', 'dynaxla.backend', 'torch._inductor.compile_fx'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout == "set()\n"


def test_cpu_seconds_include_child_processes() -> None:
    before = second_start.cpu_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.1: pass"], check=True)
    assert second_start.cpu_seconds() - before >= 0.1
