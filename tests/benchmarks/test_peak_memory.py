"""The memory of a step in a process of its own."""

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

WHAT = ("dynaxla_step", "resnet18", 4, "adamw")


def answer(monkeypatch: pytest.MonkeyPatch, code: int, output: str, errors: str) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:] == ["-m", "benchmarks.peak_memory", *map(str, WHAT)]
        return subprocess.CompletedProcess(command, code, output, errors)

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.skipif(not peak_memory.REFERENCES.exists(), reason="only Linux tells")
def test_the_process_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, 0, 'a warning\n{"peak": 3, "state": 2}\n', "")
    assert peak_memory.step_memory(*WHAT) == {"peak": 3, "state": 2}
    answer(monkeypatch, 1, "", "Traceback\nMemoryError: no more\n")
    with pytest.raises(BenchmarkError, match="dynaxla_step failed with resnet18: MemoryError: no more"):
        peak_memory.step_memory(*WHAT)


def test_elsewhere_it_cannot_be_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(peak_memory, "REFERENCES", tmp_path / "nothing")
    with pytest.raises(BenchmarkError, match="only be measured on Linux"):
        peak_memory.step_memory(*WHAT)


@pytest.mark.skipif(not peak_memory.STATUS.exists(), reason="only Linux tells")
def test_memory_is_in_bytes() -> None:
    before = peak_memory._resident("RssAnon")
    size = 64_000_000
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as held:  # no memory that the heap has already
        held.write(b"x" * size)
        assert peak_memory._resident("RssAnon") - before > 0.9 * size
    assert peak_memory._resident("VmHWM") >= peak_memory._resident("RssAnon")


# Each engine in a child of its own, of a process that has imported what they need and has used none of it.
SCRIPT = """
import json, os, torch
from torch import nn
from benchmarks import cpu, peak_memory, suites

def wide():
    return nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048))

suites.SUITES = {"models": [suites.Case("wide", wide, lambda batch, draw: (torch.randn(batch, 2048, generator=draw),))]}
for engine in cpu.MEMORY_ENGINES:
    child = os.fork()
    if not child:
        print(json.dumps([engine, peak_memory._measure(engine, "wide", 4, "adamw")]), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.thorough
@pytest.mark.skipif(not peak_memory.REFERENCES.exists(), reason="only Linux tells")
def test_a_step_holds_parameters_gradients_and_states() -> None:
    """Two states of AdamW's for each parameter; dynaxla holds at least as much as eager mode, which needs little else."""
    found = dict(map(json.loads, run_script(SCRIPT, own=True).splitlines()))
    assert tuple(found) == cpu.MEMORY_ENGINES
    parameters = 4 * 2 * (2048 * 2048 + 2048)
    for memory in found.values():
        assert memory["state"] == 3 * parameters
        assert memory["peak"] > 3.8 * parameters  # 4 of them, less what else the process gives back meanwhile
    assert found["eager"]["peak"] < 5.5 * parameters  # AdamW makes a temporary tensor for each parameter


@pytest.mark.slow
@pytest.mark.skipif(not peak_memory.REFERENCES.exists(), reason="only Linux tells")
def test_the_process_measures() -> None:
    found = peak_memory.step_memory("eager", "squeezenet1_1", 1, "sgd")
    assert found["state"] == 4 * 1_235_496
    assert found["peak"] > 2 * found["state"]
