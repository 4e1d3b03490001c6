"""The first call of a model in a fresh process, in CPU seconds: `python -m dynaxla.bench.second_start BACKEND MODEL`.

All that torch.compile needs is counted, and so are the compilers that it starts: whoever starts a server waits for that. Not counted is
what eager mode needs, too: importing torch, making the model, a first eager call. One thread.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys

import torch

from . import suites

# In the order of the table's columns. "eager" is what TorchDynamo alone takes.
ENGINES = ("inductor", "dynaxla", "eager")
DECODER = "decoder_256"


def environment(cache: str, bytecode: str) -> dict[str, str]:
    """Of a process that measures. Arguments: as of `start`."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **inherited,
        # Installed packages have their bytecode beside them. That of sources that are being changed is better kept elsewhere.
        "PYTHONPYCACHEPREFIX": bytecode,
        "DYNAXLA_CACHE": os.path.join(cache, "dynaxla"),
        "TORCHINDUCTOR_CACHE_DIR": cache,
        # Its compilers then run one by one, as children that are waited for, so that their time can be counted.
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
    }


def start(engine: str, model: str, cache: str, bytecode: str) -> float:
    """CPU seconds. engine: a backend of torch.compile's. cache: the directory of all caches, as an earlier start has left it. bytecode: the
    directory of the bytecode of all Python modules, likewise."""
    command = [sys.executable, "-m", "dynaxla.bench.second_start", engine, model]
    done = subprocess.run(command, env=environment(cache, bytecode), stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1]))


def cpu_seconds() -> float:
    """Of this process, and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(item.ru_utime + item.ru_stime for item in used)


def _measure(engine: str, name: str) -> float:
    torch.set_num_threads(1)
    (case,) = suites.choose("generation" if name == DECODER else "models", [name])
    device = torch.device("cpu")
    model = suites.make_model(case, 0, torch.float32, device)
    inputs = suites.make_inputs(case, 1, torch.Generator().manual_seed(1), torch.float32, device)
    with torch.no_grad():
        model(*inputs)
        before = cpu_seconds()
        torch.compile(model, backend=engine)(*inputs)
        return cpu_seconds() - before


if __name__ == "__main__":
    print(json.dumps(_measure(*sys.argv[1:])))
