"""The most memory that a training step holds: `python -m dynaxla.bench.peak_memory ENGINE MODEL BATCH OPTIMIZER`, in a process of its own.

In bytes, what the process holds besides the libraries: the model, its gradients, the optimizer's state, the programs, and whatever a
warm step needs on top. Compiling needs more for a while, which is not counted, and leaves pages of the compiler's own code in memory, which
are no more counted than the other libraries' (all that is mapped from files).
"""

from __future__ import annotations

import gc
import json
import re
import subprocess
import sys
from pathlib import Path

import torch

from . import engines, suites
from .benchmark_error import BenchmarkError
from .measure import rehearse
from .runner import Placement, release
from .training import Training

STATUS, REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")
WARM_STEPS, STEPS = 3, 2


def step_memory(engine: str, model: str, batch: int, optimizer: str) -> dict[str, int]:
    """`peak`, and `state`: the bytes of parameters and the optimizer's state, without gradients.

    Raises: BenchmarkError where the kernel does not tell (it must be Linux), and if the process fails.
    """
    if not REFERENCES.exists():
        raise BenchmarkError("the peak of memory can only be measured on Linux")
    command = [sys.executable, "-m", "dynaxla.bench.peak_memory", engine, model, str(batch), optimizer]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = done.stderr.strip().rpartition("\n")[2]
        raise BenchmarkError(f"{engine} failed with {model}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def _resident(which: str) -> int:
    """RssAnon: memory that no file is behind, now; RssFile: memory from files, now; VmHWM: the most of both so far. Source: proc(5)."""
    found = re.search(rf"{which}:\s+(\d+) kB", STATUS.read_text())
    assert found is not None, f"no {which} in {STATUS}"
    return int(found[1]) * 1024


def _measure(engine: str, model: str, batch: int, optimizer: str) -> dict[str, int]:
    torch.set_num_threads(1)
    placement = Placement(batch, training=optimizer)
    rehearse([engines.ENGINES[engine]], placement)
    release()  # what the heap kept would be the step's, and not count
    before = _resident("RssAnon")
    (case,) = suites.choose("models", [model])
    training = placement.model(case)
    assert isinstance(training, Training)
    inputs = placement.inputs(case, torch.Generator().manual_seed(1))
    parameters = sum(parameter.nbytes for parameter in training.parameters())
    step = engines.ENGINES[engine].prepare_call(training, inputs)
    del training  # every engine has a copy of its own
    for _ in range(WARM_STEPS):
        step(*inputs)
    gc.collect()
    REFERENCES.write_text("5")  # the most so far begins anew
    for _ in range(STEPS):
        step(*inputs)
    return {"peak": _resident("VmHWM") - _resident("RssFile") - before, "state": parameters * (3 if optimizer == "adamw" else 1)}


if __name__ == "__main__":
    name, architecture, size, optimizer_name = sys.argv[1:]
    print(json.dumps(_measure(name, architecture, int(size), optimizer_name)))
