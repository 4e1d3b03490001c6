"""First calls in fresh processes, with what an earlier one has left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import second_start
from support.processes.scripts import run_script


def test_the_process_has_caches_of_its_own_and_compiles_in_children_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(command: list[str], env: dict[str, str], check: bool, **_: Any) -> subprocess.CompletedProcess[str]:
        seen.update(command=command, env=env, check=check)
        return subprocess.CompletedProcess(command, 0, "what a compiler says\n1.5\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert second_start.start("inductor", "resnet18", "/a/cache", "/bytecode") == 1.5
    assert seen["command"][1:] == ["-m", "benchmarks.second_start", "inductor", "resnet18"]
    assert (seen["env"]["DYNAXLA_CACHE"], seen["env"]["TORCHINDUCTOR_CACHE_DIR"]) == ("/a/cache/dynaxla", "/a/cache")
    assert seen["env"]["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert seen["env"]["PYTHONPYCACHEPREFIX"] == "/bytecode"
    assert "PYTHONDONTWRITEBYTECODE" not in seen["env"]
    assert seen["check"], "a failure must not be a measurement"


def test_a_process_leaves_bytecode_to_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    subprocess.run([sys.executable, "-c", "import json"], env=second_start.environment("", str(tmp_path)), check=True)
    assert list(tmp_path.glob("**/json/__init__.*.pyc"))


def test_a_first_call_is_measured_and_leaves_its_graph_to_the_next(tmp_path: Path) -> None:
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
    assert list(tmp_path.glob("graphs/*")), "no graph is kept for a second start"


def test_nothing_of_a_compilers_is_imported_before_it_is_counted() -> None:
    code = "import sys, benchmarks.second_start; print({'jax', 'dynaxla.backend', 'torch._inductor.compile_fx'} & {*sys.modules})"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout == "set()\n"


def test_children_are_counted() -> None:
    before = second_start.cpu_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.1: pass"], check=True)
    assert second_start.cpu_seconds() - before >= 0.1
