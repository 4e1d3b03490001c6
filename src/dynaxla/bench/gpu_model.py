"""One model for `dynaxla bench-gpu`, in processes of its own: one for the times of all engines, and one for the memory of each.

`python -m dynaxla.bench.gpu_model PART MODEL DEVICE SECONDS` prints times, and with an engine's name behind it that engine's memory. A
kernel that fails leaves a CUDA context in which nothing works any more, and what one engine has allocated would be counted with another's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from . import engines as engine_table
from . import report, suites
from .gpu_parts import PARTS, Part
from .measure import Settings, measure, rehearse
from .runner import Placement, device_peak_bytes

# Of the memory: calls before it counts, in which programs are compiled and memory is seen for the second time; calls that count.
WARM_CALLS, CALLS = 3, 2


def measure_times(part: str, model: str, device: str, seconds: float, end: float, caches: Path) -> dict[str, Any] | None:
    """`environment`, and `engines`: by engine `good`, `ms` with `lower` and `upper` quartiles, `first_call` in seconds, or `failure`.

    caches: this model's directory, which is empty or not there. Returns None if the process was not done by `end`, a time of
    time.monotonic().
    """
    found = _answer([part, model, device, str(seconds)], _with_caches(caches), end)
    if found is None or "failure" in found:
        return found and {"environment": {}, "engines": {name: {"good": False, **found} for name in PARTS[part].engines}}
    return found


def measure_memory(part: str, model: str, engine: str, device: str, seconds: float, end: float, caches: Path) -> dict[str, Any] | None:
    """`peak`, the engine's memory in bytes (None where it is not known), or `failure`; None if the process was not done by `end`.

    caches: the directory that `measure_times` was given, or an empty one. What it holds need not be compiled again, and the memory that
    XLA needs to try out kernels is not counted.
    """
    return _answer([part, model, device, str(seconds), engine], _with_caches(caches), end)


def _with_caches(directory: Path) -> dict[str, str]:
    """The environment of a process that keeps everything it compiles in this directory: dynaxla's and Inductor's caches, JAX's compiled
    programs, and XLA's autotuning results (xla_gpu_per_fusion_autotune_cache_dir in openxla/xla)."""
    tuned, compiled = directory / "xla", directory / "jax"
    for each in (tuned, compiled):
        each.mkdir(parents=True, exist_ok=True)
    return {
        **os.environ,
        "DYNAXLA_CACHE": str(directory),
        "TORCHINDUCTOR_CACHE_DIR": str(directory),
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_per_fusion_autotune_cache_dir={tuned}".strip(),
    }


def _answer(arguments: Sequence[str], environment: dict[str, str], end: float) -> dict[str, Any] | None:
    """What the process prints last, or `failure`. None if it was not done in time, and then it is stopped with its children."""
    command = [sys.executable, "-m", "dynaxla.bench.gpu_model", *arguments]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        output, errors = process.communicate(timeout=max(0.0, end - time.monotonic()))
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            return None
        raise
    if process.returncode:
        return {"failure": errors.strip().rpartition("\n")[2] or f"exit code {process.returncode}"}
    return json.loads(output.splitlines()[-1])


def _times(part: Part, case: suites.Case, device: torch.device, seconds: float) -> dict[str, Any]:
    chosen, _ = engine_table.choose([], part.engines)
    placement = _placement(part, device)
    rehearse(chosen, placement)
    rows: dict[str, Any] = {}
    for row in measure(case, chosen, Settings(placement, iterations_per_run=part.calls, seconds=seconds)).rows:
        rows[row.engine] = {"good": row.good}
        if row.wall is not None:
            rows[row.engine] |= {"ms": row.wall.median, "lower": row.wall.lower, "upper": row.wall.upper}
            rows[row.engine]["first_call"] = row.first_call_seconds
        if not row.good:
            rows[row.engine]["failure"] = row.failure or "disagrees with eager"
    return {"environment": report.environment(), "engines": rows}


def _memory(part: Part, case: suites.Case, device: torch.device, engine: str) -> dict[str, int | None]:
    placement = _placement(part, device)
    inputs = placement.inputs(case, torch.Generator().manual_seed(1))
    with torch.no_grad():
        model = placement.model(case)
        call = engine_table.ENGINES[engine].prepare_call(model, inputs)
        del model  # for training, every engine has a copy of its own
        for _ in range(WARM_CALLS):
            call(*inputs)
        placement.synchronise()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(CALLS):
            call(*inputs)
        placement.synchronise()
    return {"peak": device_peak_bytes(device)}


def _placement(part: Part, device: torch.device) -> Placement:
    return Placement(part.batch, part.dtype, device, threads=torch.get_num_threads(), training=part.training)


def main(part: str, model: str, device: str, seconds: str, engine: str = "") -> None:
    settings = PARTS[part]
    settings.set_precision()
    (case,) = suites.choose("gpu", [model])
    where = torch.device(device)
    print(json.dumps(_memory(settings, case, where, engine) if engine else _times(settings, case, where, float(seconds))))


if __name__ == "__main__":
    main(*sys.argv[1:])
