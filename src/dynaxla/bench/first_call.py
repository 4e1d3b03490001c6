"""The first call of each model in one engine, in CPU seconds: `python -m dynaxla.bench.first_call ENGINE`, in a process of its own.

CPU seconds of the process and of the compilers that it starts, one thread. What happens once per process is over before they are counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from ..observe import metrics
from . import engines, suites
from .measure import rehearse
from .runner import Placement
from .second_start import cpu_seconds, environment

PHASES = ("trace", "lower", "compile")


def first_calls(engine: str, models: Sequence[str], cache: str, bytecode: str) -> dict[str, dict[str, float]]:
    """CPU seconds by model: "cpu", of the whole first call, and of dynaxla's phases `PHASES`. cache, bytecode: as of `start`."""
    command = [sys.executable, "-m", "dynaxla.bench.first_call", engine, *models]
    done = subprocess.run(command, env=environment(cache, bytecode), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _measure(engine: str, models: Sequence[str]) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    metrics.use_clock(time.process_time)
    placement = Placement()
    found = {}
    rehearse([engines.ENGINES[engine]], placement)
    for case in suites.choose("models", models):
        model = placement.model(case)
        inputs = placement.inputs(case, torch.Generator().manual_seed(1))
        with torch.no_grad():
            model(*inputs)
            before, start = metrics.seconds(), cpu_seconds()
            engines.ENGINES[engine].prepare(model, inputs)(*inputs)
            cpu, after = cpu_seconds() - start, metrics.seconds()
        found[case.name] = {"cpu": cpu, **{phase: after.get(phase, 0.0) - before.get(phase, 0.0) for phase in PHASES}}
        torch._dynamo.reset()
    return found


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], sys.argv[2:])))
