"""Tests of measurements of one model in child processes: their results, failures and timeouts."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu_parts import PARTS
from torch import nn

from benchmarks import gpu_model, processes, suites
from dynaxla.bench import runner
from support.fakes.tiny_benchmark import TINY

PART, PYTHON = "float32-batch1", sys.executable


@pytest.mark.thorough
@pytest.mark.parametrize("training", ["", "adamw"])
def test_process_prints_rows_of_a_tiny_model(training: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """On the CPU, where peak memory is not measured."""
    engines = ("eager", "dynaxla", "dynaxla_step") if training else ("eager", "dynaxla")
    part = dataclasses.replace(PARTS[PART], engines=engines, training=training, batch=2)
    monkeypatch.setitem(gpu_model.PARTS, PART, part)
    monkeypatch.setattr(gpu_model.Part, "set_precision", lambda self: None)
    monkeypatch.setitem(suites.SUITES, "gpu", [TINY])
    gpu_model.main(PART, "tiny", "cpu", "0.0")
    printed = json.loads(capsys.readouterr().out)
    assert printed["environment"]["torch"] == version("torch")
    assert list(printed["engines"]) == list(engines)
    for row in printed["engines"].values():
        assert row["good"], row
        assert 0 < row["lower"] <= row["ms"] <= row["upper"]
        assert row["first_call"] > 0
    gpu_model.main(PART, "tiny", "cpu", "0.0", "dynaxla")
    assert json.loads(capsys.readouterr().out) == {"peak": None}


def replace_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    """Replaces each child process by one that runs `source` with the same arguments."""
    package = tmp_path / "bin"
    package.write_text(f"#!{PYTHON}\n{source}")
    package.chmod(0o700)
    monkeypatch.setattr(gpu_model.sys, "executable", str(package))


CHILD = """
import json, os, sys
part, model, device, seconds, *engine = sys.argv[3:]
assert sys.argv[1:3] == ["-m", "benchmarks.gpu_model"] and (part, model, device, seconds) == ("float32-batch1", "vgg16", "cuda", "2.0")
cache = os.environ["DYNAXLA_CACHE"]
assert cache == os.environ["TORCHINDUCTOR_CACHE_DIR"] and f"--xla_gpu_per_fusion_autotune_cache_dir={cache}/xla" in os.environ["XLA_FLAGS"]
assert os.path.isdir(f"{cache}/xla") and os.environ["XLA_FLAGS"].startswith("--first")
if engine == ["inductor"]:
    raise MemoryError("no more")
rows = {"eager": {"good": True, "ms": 1.0}, "inductor": {"good": True, "ms": 2.0}, "dynaxla": {"good": False, "failure": "wrong"}}
print("a word before")
print(json.dumps({"peak": 7 if os.path.exists(f"{cache}/times") else 0} if engine else {"environment": {}, "engines": rows}))
open(f"{cache}/{'memory' if engine else 'times'}", "x").close()
"""


def test_processes_share_the_caches_of_a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace_process(monkeypatch, tmp_path, CHILD)
    monkeypatch.setenv("XLA_FLAGS", "--first")
    model_arguments, settings = (PART, "vgg16"), ("cuda", 2.0, time.monotonic() + 100, tmp_path / "caches")
    measured = gpu_model.measure_times(*model_arguments, *settings)
    assert measured is not None
    assert measured["engines"]["eager"] == {"good": True, "ms": 1.0}
    assert gpu_model.measure_memory(*model_arguments, "eager", *settings) == {"peak": 7}
    assert gpu_model.measure_memory(*model_arguments, "inductor", *settings) == {"failure": "MemoryError: no more"}


def test_crashed_process_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace_process(monkeypatch, tmp_path, "raise RuntimeError('CUDA error: an illegal memory access')")
    measured = gpu_model.measure_times(PART, "vgg16", "cuda", 2.0, time.monotonic() + 100, tmp_path)
    failure = {"good": False, "failure": "RuntimeError: CUDA error: an illegal memory access"}
    assert measured == {"environment": {}, "engines": dict.fromkeys(PARTS[PART].engines, failure)}
    replace_process(monkeypatch, tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    measured = gpu_model.measure_times(PART, "vgg16", "cuda", 2.0, time.monotonic() + 100, tmp_path)
    assert measured is not None
    assert measured["engines"]["eager"]["failure"] == "exit code -11"


@pytest.mark.thorough
def test_process_with_timeout_is_stopped_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child"
    source = f"import subprocess, time; open({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '100']).pid)); time.sleep(100)"
    replace_process(monkeypatch, tmp_path, source)
    start = time.monotonic()
    assert gpu_model.measure_times(PART, "vgg16", "cuda", 2.0, start + 2, tmp_path) is None
    assert time.monotonic() - start < 20
    state = Path(f"/proc/{child.read_text()}/stat")
    for _ in range(500):  # its parent has ended, and init may not have reaped it yet
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if state.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
                continue
        break
    else:
        pytest.fail("the child of a stopped process still runs")


def test_peak_memory_excludes_calls_that_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's statistics are reset after the calls that compile programs. JAX's peak is added."""
    events: list[Any] = []

    class Engine:
        def prepare_call(self, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
            return lambda *_: events.append("call")

    class FakeSetup(runner.ModelSetup):
        def inputs(self, case: Any, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
            return ()

        def model(self, case: Any) -> nn.Module:
            return nn.Identity()

    device = torch.device("cuda:0")
    monkeypatch.setitem(gpu_model.engine_table.ENGINES, "eager", Engine())
    monkeypatch.setattr(gpu_model, "ModelSetup", FakeSetup)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: events.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: events.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 30)
    monkeypatch.setattr(
        processes, "jax_device", lambda device: type("Device", (), {"memory_stats": lambda self: {"peak_bytes_in_use": 12}})()
    )
    assert gpu_model._memory(PARTS[PART], None, device, "eager") == {"peak": 42}
    assert events == ["call"] * 3 + ["wait", "reset"] + ["call"] * 2 + ["wait"]
