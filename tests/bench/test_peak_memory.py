"""The memory of a step in a process of its own; `dynaxla bench-cpu training-memory` (test_cpu.py) measures one in full."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from dynaxla.bench import peak_memory
from dynaxla.bench.benchmark_error import BenchmarkError

WHAT = ("dynaxla_step", "resnet18", 4, "adamw")


def answer(monkeypatch: pytest.MonkeyPatch, code: int, output: str, errors: str) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[1:] == ["-m", "dynaxla.bench.peak_memory", *map(str, WHAT)]
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
    held = torch.ones(16_000_000)
    assert peak_memory._resident("RssAnon") - before > 0.9 * held.nbytes
    assert peak_memory._resident("VmHWM") >= peak_memory._resident("RssAnon")
