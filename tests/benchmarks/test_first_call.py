"""Tests of measurements of first calls, each in a process with its own caches."""

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


def test_process_has_its_own_caches_and_the_environment_of_second_start(monkeypatch: pytest.MonkeyPatch) -> None:
    call: dict[str, Any] = {}

    def run(command: list[str], env: dict[str, str], check: bool, **_: Any) -> subprocess.CompletedProcess[str]:
        call.update(command=command, env=env, check=check)
        return subprocess.CompletedProcess(command, 0, "what a compiler says\n" + json.dumps({"resnet18": {"cpu": 1.5}}) + "\n")

    monkeypatch.setattr(subprocess, "run", run)
    assert first_call.first_calls("inductor", ["resnet18", "vgg16"], "/a/cache", "/bytecode") == {"resnet18": {"cpu": 1.5}}
    assert call["command"][1:] == ["-m", "benchmarks.first_call", "inductor", "resnet18", "vgg16"]
    assert call["env"] == second_start.environment("/a/cache", "/bytecode")
    assert call["check"], "a failure must not be a measurement"


@pytest.mark.slow
def test_measurement_of_eager_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager mode has no phases. The environment is replaced so that the process need not compile all of torch's modules to bytecode."""
    monkeypatch.setattr(first_call, "environment", lambda *directories: dict(os.environ))
    (measured,) = first_call.first_calls("eager", ["squeezenet1_1"], "", "").items()
    assert measured[0] == "squeezenet1_1"
    assert measured[1].pop("cpu") > 0
    assert measured[1] == {"trace": 0, "lower": 0, "compile": 0}


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
