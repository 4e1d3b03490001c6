"""CPU seconds of the first call of each model in one engine: `python -m benchmarks.first_call ENGINE MODEL...`, in its own process.

The CPU seconds include those of the compilers that the process starts. There is one thread. Work that is done once per process is not
counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from dynaxla.bench.measure import warm_up_engines
from dynaxla.bench.runner import ModelSetup
from dynaxla.observe import metrics

from . import ROOT, engines, suites
from .second_start import cpu_seconds, environment

PHASES = ("trace", "lower", "compile")


def first_calls(engine: str, models: Sequence[str], cache: str, bytecode: str) -> dict[str, dict[str, float]]:
    """Returns, by model, CPU seconds of the whole first call ("cpu") and of dynaxla's `PHASES`. `start` explains `cache` and `bytecode`."""
    command = [sys.executable, "-m", "benchmarks.first_call", engine, *models]
    done = subprocess.run(command, cwd=ROOT, env=environment(cache, bytecode), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _measure(engine: str, models: Sequence[str]) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    metrics.use_clock(time.process_time)
    setup = ModelSetup()
    found = {}
    warm_up_engines([engines.ENGINES[engine]], setup)
    for case in suites.choose("models", models):
        model = setup.model(case)
        inputs = setup.inputs(case, torch.Generator().manual_seed(1))
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
