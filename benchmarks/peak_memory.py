"""Peak memory of a training step: `python -m benchmarks.peak_memory ENGINE MODEL BATCH OPTIMIZER`, in a process of its own.

The peak, in bytes, includes the model, its gradients, the optimizer's state, the programs, and the temporary memory of a warm step. It does
not include the temporary memory of compilation, nor pages that are mapped from files, such as the code of libraries and the compiler.
"""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import torch

from dynaxla.bench.benchmark_error import BenchmarkError
from dynaxla.bench.measure import warm_up_engines
from dynaxla.bench.runner import ModelSetup, release_memory
from dynaxla.bench.training import TrainingStep

from . import ROOT, engines, suites

STATUS, REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WARM_STEPS, STEPS = 3, 2


def step_memory(engine: str, model: str, batch: int, optimizer: str) -> dict[str, int]:
    """Returns, in bytes, `peak`, and `state`: parameters and the optimizer's state, without gradients.

    Raises: BenchmarkError if the system is not Linux, or if the process fails.
    """
    if not REFERENCES.exists():
        raise BenchmarkError("the peak of memory can only be measured on Linux")
    command = [sys.executable, "-m", "benchmarks.peak_memory", engine, model, str(batch), optimizer]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise BenchmarkError(f"{engine} failed with {model}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _resident(which: str) -> int:
    """Returns a size in bytes: RssAnon, current memory not backed by files; RssFile, current memory of files; VmHWM, the peak of both.

    Source: proc(5).
    """
    found = re.search(rf"{which}:\s+(\d+) kB", STATUS.read_text())
    assert found is not None, f"no {which} in {STATUS}"
    return int(found[1]) * 1024


def _measure(engine: str, model: str, batch: int, optimizer: str) -> dict[str, int]:
    torch.set_num_threads(1)
    setup = ModelSetup(batch, training=optimizer)
    warm_up_engines([engines.ENGINES[engine]], setup)
    release_memory()  # the step could reuse free memory of the heap, which would not be counted
    before = _resident("RssAnon")
    (case,) = suites.choose("models", [model])
    training = setup.model(case)
    assert isinstance(training, TrainingStep)
    inputs = setup.inputs(case, torch.Generator().manual_seed(1))
    parameters = sum(parameter.nbytes for parameter in training.parameters())
    step = engines.ENGINES[engine].prepare_call(training, inputs)
    del training  # the engine has a copy of its own
    for _ in range(WARM_STEPS):
        step(*inputs)
    gc.collect()
    REFERENCES.write_text("5")  # resets the peak
    for _ in range(STEPS):
        step(*inputs)
    return {"peak": _resident("VmHWM") - _resident("RssFile") - before, "state": parameters * (3 if optimizer == "adamw" else 1)}


if __name__ == "__main__":
    name, architecture, size, optimizer_name = sys.argv[1:]
    print(json.dumps(_measure(name, architecture, int(size), optimizer_name)))
