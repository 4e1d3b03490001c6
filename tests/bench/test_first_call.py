"""First calls in a process of their own; `dynaxla bench-cpu first-call` (test_cpu.py) runs one in full."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from dynaxla.bench import first_call


def test_the_process_has_caches_of_its_own_and_compiles_in_children_that_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(command: list[str], env: dict[str, str], check: bool, **_: Any) -> subprocess.CompletedProcess[str]:
        seen.update(command=command, env=env, check=check)
        return subprocess.CompletedProcess(command, 0, "what a compiler says\n" + json.dumps({"resnet18": {"cpu": 1.5}}) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert first_call.first_calls("inductor", ["resnet18", "vgg16"], "/a/cache") == {"resnet18": {"cpu": 1.5}}
    assert seen["command"][1:] == ["-m", "dynaxla.bench.first_call", "inductor", "resnet18", "vgg16"]
    assert {seen["env"][name] for name in ("DYNAXLA_CACHE", "TORCHINDUCTOR_CACHE_DIR")} == {"/a/cache"}
    assert seen["env"]["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    assert seen["check"], "a failure must not be a measurement"


def test_children_are_counted() -> None:
    before = first_call._cpu_seconds()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.1: pass"], check=True)
    assert first_call._cpu_seconds() - before >= 0.1
