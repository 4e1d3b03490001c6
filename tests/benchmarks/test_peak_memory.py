"""Tests of the measurement of a step's memory in its own process."""

from __future__ import annotations

import json
import mmap
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cpu, peak_memory
from dynaxla.bench.benchmark_error import BenchmarkError
from support.processes.scripts import run_script

MEASUREMENT = ("dynaxla_step", "resnet18", 4, "adamw")


def replace_process(monkeypatch: pytest.MonkeyPatch, code: int, output: str, errors: str) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:] == ["-m", "benchmarks.peak_memory", *map(str, MEASUREMENT)]
        return subprocess.CompletedProcess(command, code, output, errors)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.skipif(not peak_memory.REFERENCES.exists(), reason="only Linux reports peak memory")
def test_result_and_failure_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_process(monkeypatch, 0, 'a warning\n{"peak": 3, "state": 2}\n', "")
    assert peak_memory.step_memory(*MEASUREMENT) == {"peak": 3, "state": 2}
    replace_process(monkeypatch, 1, "", "Traceback\nMemoryError: no more\n")
    with pytest.raises(BenchmarkError, match="dynaxla_step failed with resnet18: MemoryError: no more"):
        peak_memory.step_memory(*MEASUREMENT)


def test_measurement_outside_linux_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peak_memory, "REFERENCES", tmp_path / "nothing")
    with pytest.raises(BenchmarkError, match="only be measured on Linux"):
        peak_memory.step_memory(*MEASUREMENT)


@pytest.mark.skipif(not peak_memory.STATUS.exists(), reason="only Linux reports peak memory")
def test_memory_is_in_bytes() -> None:
    before = peak_memory._resident("RssAnon")
    size = 64_000_000
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as mapped:  # not memory that the heap already has
        mapped.write(b"x" * size)
        assert peak_memory._resident("RssAnon") - before > 0.9 * size
    assert peak_memory._resident("VmHWM") >= peak_memory._resident("RssAnon")


# Each engine runs in its own fork of a process that has only imported the modules.
SCRIPT = """
import json, os, torch
from torch import nn
from benchmarks import cpu, peak_memory, suites

def wide():
    return nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))

suites.SUITES = {"models": [suites.BenchCase("wide", wide, lambda batch, draw: (torch.randn(batch, 2048, generator=draw),))]}
for engine in cpu.MEMORY_ENGINES:
    child = os.fork()
    if not child:
        print(json.dumps([engine, peak_memory._measure(engine, "wide", 4, "adamw")]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.thorough
@pytest.mark.skipif(not peak_memory.REFERENCES.exists(), reason="only Linux reports peak memory")
def test_peak_includes_parameters_gradients_and_optimizer_states() -> None:
    """AdamW has two states for each parameter. The peak of dynaxla is at least that of eager mode, which needs little else."""
    measured = dict(map(json.loads, run_script(SCRIPT, own=True).splitlines()))
    assert tuple(measured) == cpu.MEMORY_ENGINES
    parameters = 4 * 2 * (2048 * 2048 + 2048)
    for memory in measured.values():
        assert memory["state"] == 3 * parameters
        assert memory["peak"] > 3.8 * parameters  # parameters, gradients and two states, less memory that the process frees meanwhile
    assert measured["eager"]["peak"] < 5.5 * parameters  # AdamW makes a temporary tensor for each parameter


@pytest.mark.slow
@pytest.mark.skipif(not peak_memory.REFERENCES.exists(), reason="only Linux reports peak memory")
def test_measurement_of_eager_mode() -> None:
    memory = peak_memory.step_memory("eager", "squeezenet1_1", 1, "sgd")
    assert memory["state"] == 4 * 1_235_496
    assert memory["peak"] > 2 * memory["state"]
