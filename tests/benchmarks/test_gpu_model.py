"""One model in processes of its own: what they print is put together, and what fails or takes too long is told apart."""

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
def test_what_a_process_prints(training: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a tiny model, on the CPU, which does not tell the most memory."""
    engines = ("eager", "dynaxla", "dynaxla_step") if training else ("eager", "dynaxla")
    part = dataclasses.replace(PARTS[PART], engines=engines, training=training, batch=2)
    monkeypatch.setitem(gpu_model.PARTS, PART, part)
    monkeypatch.setattr(gpu_model.Part, "set_precision", lambda self: None)
    monkeypatch.setitem(suites.SUITES, "gpu", [TINY])
    gpu_model.main(PART, "tiny", "cpu", "0.0")
    found = json.loads(capsys.readouterr().out)
    assert found["environment"]["torch"] == version("torch")
    assert list(found["engines"]) == list(engines)
    for row in found["engines"].values():
        assert row["good"], row
        assert 0 < row["lower"] <= row["ms"] <= row["upper"]
        assert row["first_call"] > 0
    gpu_model.main(PART, "tiny", "cpu", "0.0", "dynaxla")
    assert json.loads(capsys.readouterr().out) == {"peak": None}


def double(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str) -> None:
    """In the place of each process, one that runs `source`, with the same arguments behind it."""
    package = tmp_path / "bin"
    package.write_text(f"#!{PYTHON}\n{source}")
    package.chmod(0o700)
    monkeypatch.setattr(gpu_model.sys, "executable", str(package))


ANSWERS = """
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


def test_processes_share_a_models_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    double(monkeypatch, tmp_path, ANSWERS)
    monkeypatch.setenv("XLA_FLAGS", "--first")
    asked, rest = (PART, "vgg16"), ("cuda", 2.0, time.monotonic() + 100, tmp_path / "caches")
    found = gpu_model.measure_times(*asked, *rest)
    assert found is not None
    assert found["engines"]["eager"] == {"good": True, "ms": 1.0}
    assert gpu_model.measure_memory(*asked, "eager", *rest) == {"peak": 7}
    assert gpu_model.measure_memory(*asked, "inductor", *rest) == {"failure": "MemoryError: no more"}


def test_a_process_that_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    double(monkeypatch, tmp_path, "raise RuntimeError('CUDA error: an illegal memory access')")
    found = gpu_model.measure_times(PART, "vgg16", "cuda", 2.0, time.monotonic() + 100, tmp_path)
    failure = {"good": False, "failure": "RuntimeError: CUDA error: an illegal memory access"}
    assert found == {"environment": {}, "engines": dict.fromkeys(PARTS[PART].engines, failure)}
    double(monkeypatch, tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    found = gpu_model.measure_times(PART, "vgg16", "cuda", 2.0, time.monotonic() + 100, tmp_path)
    assert found is not None
    assert found["engines"]["eager"]["failure"] == "exit code -11"


@pytest.mark.thorough
def test_a_process_that_takes_too_long_is_stopped_with_its_children(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    child = tmp_path / "child"
    source = f"import subprocess, time; open({str(child)!r}, 'w').write(str(subprocess.Popen(['sleep', '100']).pid)); time.sleep(100)"
    double(monkeypatch, tmp_path, source)
    begun = time.monotonic()
    assert gpu_model.measure_times(PART, "vgg16", "cuda", 2.0, begun + 2, tmp_path) is None
    assert time.monotonic() - begun < 20
    state = Path(f"/proc/{child.read_text()}/stat")
    for _ in range(500):  # its parent is gone, and init may not have asked for it yet
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if state.read_text().rpartition(")")[2].split()[0] != "Z":
                time.sleep(0.01)
                continue
        break
    else:
        pytest.fail("the child of a stopped process still runs")


def test_memory_of_warm_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's statistics begin anew after the calls in which programs are compiled; JAX's peak is added."""
    told: list[Any] = []

    class Engine:
        def prepare_call(self, model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
            return lambda *_: told.append("call")

    class Placed(runner.ModelSetup):
        def inputs(self, case: Any, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
            return ()

        def model(self, case: Any) -> nn.Module:
            return nn.Identity()

    device = torch.device("cuda:0")
    monkeypatch.setitem(gpu_model.engine_table.ENGINES, "eager", Engine())
    monkeypatch.setattr(gpu_model, "ModelSetup", Placed)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: told.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: told.append("anew"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 30)
    monkeypatch.setattr(
        processes, "jax_device", lambda device: type("Device", (), {"memory_stats": lambda self: {"peak_bytes_in_use": 12}})()
    )
    assert gpu_model._memory(PARTS[PART], None, device, "eager") == {"peak": 42}
    assert told == ["call"] * 3 + ["wait", "anew"] + ["call"] * 2 + ["wait"]
