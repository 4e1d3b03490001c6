"""First calls in a process of their own, with caches of its own."""

from __future__ import annotations

import json
import os
import subprocess
import time
from typing import Any

import pytest

from benchmarks import first_call, second_start, suites
from dynaxla.observe import metrics
from support.fakes.tiny_benchmark import TINY


def test_the_process_has_caches_of_its_own_and_is_started_like_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def run(command: list[str], env: dict[str, str], check: bool, **_: Any) -> subprocess.CompletedProcess[str]:
        seen.update(command=command, env=env, check=check)
        return subprocess.CompletedProcess(command, 0, "what a compiler says\n" + json.dumps({"resnet18": {"cpu": 1.5}}) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert first_call.first_calls("inductor", ["resnet18", "vgg16"], "/a/cache", "/bytecode") == {"resnet18": {"cpu": 1.5}}
    assert seen["command"][1:] == ["-m", "benchmarks.first_call", "inductor", "resnet18", "vgg16"]
    assert seen["env"] == second_start.environment("/a/cache", "/bytecode")
    assert seen["check"], "a failure must not be a measurement"


@pytest.mark.slow
def test_the_process_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager mode has no phases of dynaxla's. (With bytecode of its own the process would first compile all of torch's modules.)"""
    monkeypatch.setattr(first_call, "environment", lambda *directories: dict(os.environ))
    (found,) = first_call.first_calls("eager", ["squeezenet1_1"], "", "").items()
    assert found[0] == "squeezenet1_1"
    assert found[1].pop("cpu") > 0
    assert found[1] == {"trace": 0, "lower": 0, "compile": 0}


def test_phases_are_part_of_a_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(suites.SUITES, "models", [TINY])
    try:
        compiled, captured = (first_call._measure(engine, ["tiny"])["tiny"] for engine in ("dynaxla", "dynamo_aot"))
    finally:
        metrics.use_clock(time.perf_counter)
    assert compiled.keys() == captured.keys() == {"cpu", *first_call.PHASES}
    assert all(compiled[phase] > 0 for phase in first_call.PHASES)
    assert sum(compiled[phase] for phase in first_call.PHASES) < compiled["cpu"]
    assert captured.pop("cpu") > 0
    assert set(captured.values()) == {0.0}
