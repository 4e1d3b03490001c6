"""CPU seconds of a model's first call in a fresh process: `python -m benchmarks.second_start BACKEND MODEL`.

All costs of torch.compile are counted, including its imports and the compilers that it starts: the start of a server has to wait for them.
Costs that eager mode has, too, are not counted: importing torch, building the model, a first eager call. One thread is used.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import torch

from dynaxla.bench.suites import make_inputs, make_model

from . import ROOT, suites

# In the order of the table's columns. The backend "eager" is the cost of TorchDynamo alone.
ENGINES = ("inductor", "dynaxla", "eager")
DECODER = "decoder_256"


def environment(cache: str, bytecode: str) -> dict[str, str]:
    """Returns the environment of a measuring process; for the arguments see `start`."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **inherited,
        # Installed packages have bytecode next to their sources. For sources that change, it is kept in a separate directory.
        "PYTHONPYCACHEPREFIX": bytecode,
        "DYNAXLA_CACHE": os.path.join(cache, "dynaxla"),
        "TORCHINDUCTOR_CACHE_DIR": cache,
        # Inductor's compilers then run one by one, as awaited child processes, so that their time can be counted.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def start(engine: str, model: str, cache: str, bytecode: str) -> float:
    """Returns CPU seconds of a first call in a fresh process.

    Args:
        engine: a backend of torch.compile.
        model: the model's name.
        cache: the directory of all caches; empty, or as an earlier start has left it.
        bytecode: the directory of the bytecode of all Python modules; empty, or as an earlier start has left it.
    """
    command = [sys.executable, "-m", "benchmarks.second_start", engine, model]
    done = subprocess.run(command, cwd=ROOT, env=environment(cache, bytecode), stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def cpu_seconds() -> float:
    """Returns CPU seconds of this process, and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in used)


def _measure(engine: str, name: str) -> float:
    torch.set_num_threads(1)
    (case,) = suites.choose("generation" if name == DECODER else "models", [name])
    device = torch.device("cpu")
    model = make_model(case, 0, torch.float32, device)
    inputs = make_inputs(case, 1, torch.Generator().manual_seed(1), torch.float32, device)
    with torch.no_grad():
        model(*inputs)
        before = cpu_seconds()
        torch.compile(model, backend=engine)(*inputs)
        return cpu_seconds() - before


if __name__ == "__main__":
    print(json.dumps(_measure(*sys.argv[1:])))
