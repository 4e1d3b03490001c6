"""One model of `python -m benchmarks gpu`, in separate processes: one for the times of all engines, and one for the memory of each engine.

`python -m benchmarks.gpu_model PART MODEL DEVICE SECONDS` prints times, and with an engine's name at the end that engine's memory. Times
are measured when it is the process's turn (see `Turn`). The processes are separate because a kernel that fails makes its CUDA context
unusable, and because one engine's memory would be counted with another's.
"""

from __future__ import annotations

import dataclasses
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

from dynaxla.bench import report
from dynaxla.bench.measure import BenchSettings, measure, warm_up_engines
from dynaxla.bench.runner import ModelSetup
from dynaxla.bench.suites import BenchCase

from . import ROOT, suites
from . import engines as engine_table
from .gpu_parts import PARTS, Part
from .processes import device_peak_bytes

# The numbers of calls for a measurement of memory: warm-up calls, in which programs are compiled and the same memory is seen for the second
# time, and calls whose peak is counted.
WARM_CALLS, CALLS = 3, 2


# Seconds between two checks of whose turn it is.
INTERVAL = 0.2
# The environment variable that names a process's directory of a `Turn`.
_TURN = "DYNAXLA_BENCH_TURN"


class Turn:
    """One process's turn to be timed: processes compile in parallel, and are timed one after the other.

    Two files in `directory`, which is created, are the messages between the processes.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.is_stopped = False

    @property
    def is_ready(self) -> bool:
        """True if the process has compiled everything."""
        return (self.directory / "ready").exists()

    def give(self) -> None:
        """Lets the process measure its times."""
        (self.directory / "go").touch()

    def stop(self) -> None:
        """Ends the process at its next check."""
        self.is_stopped = True

    def wait(self) -> None:
        """Called in the measuring process: reports that it is ready, and waits until it is its turn."""
        (self.directory / "ready").touch()
        while not (self.directory / "go").exists():
            time.sleep(INTERVAL)


def measure_times(
    part: str, model: str, device: str, seconds: float, end: float, caches: Path, turn: Turn | None = None
) -> dict[str, Any] | None:
    """Measures the times of a model in a process of its own.

    Args:
        part: the name of the table.
        model: the model's name.
        device: the device's name.
        seconds: about how long each engine is timed.
        end: when the process is stopped, as a time of time.monotonic().
        caches: this model's directory, which is empty or missing.
        turn: says when times may be measured; None: at once.

    Returns:
        `environment`, and `engines`: by engine `good`, the median `ms` with `lower` and `upper` quartiles, `first_call` in seconds, or
        `failure`. None if the process did not finish by `end`, or was stopped.
    """
    variables = _with_caches(caches) | ({_TURN: str(turn.directory)} if turn is not None else {})
    found = _answer([part, model, device, str(seconds)], variables, end, turn)
    if found is None or "failure" in found:
        return found and {"environment": {}, "engines": {name: {"good": False, **found} for name in PARTS[part].engines}}
    return found


def measure_memory(part: str, model: str, engine: str, device: str, seconds: float, end: float, caches: Path) -> dict[str, Any] | None:
    """Measures the memory of an engine in a process of its own.

    The arguments are those of `measure_times`. If `caches` is the directory that `measure_times` has filled, nothing is compiled again, and
    the memory that XLA needs to autotune kernels is not counted.

    Returns: `peak`, the memory in bytes (None if unknown), or `failure`; None if the process did not finish by `end`.
    """
    return _answer([part, model, device, str(seconds), engine], _with_caches(caches), end)


def _with_caches(directory: Path) -> dict[str, str]:
    """Returns the environment of a process that keeps everything it compiles in this directory.

    The process keeps dynaxla's and Inductor's caches, JAX's compiled programs, and XLA's autotuning results
    (xla_gpu_per_fusion_autotune_cache_dir in openxla/xla).
    """
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


def _answer(arguments: Sequence[str], environment: dict[str, str], end: float, turn: Turn | None = None) -> dict[str, Any] | None:
    """Runs a process, and returns the JSON in its last line, or `failure`.

    Returns None if the process does not finish in time, or was stopped. The process is then killed with its children.
    """
    command = [sys.executable, "-m", "benchmarks.gpu_model", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while (output := _output(process)) is None:
            if time.monotonic() >= end or (turn is not None and turn.is_stopped):
                return None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    text, errors = output
    if process.returncode:
        return {"failure": errors.strip().rpartition("\n")[2] or f"exit code {process.returncode}"}
    return json.loads(text.splitlines()[-1])


def _output(process: subprocess.Popen[str]) -> tuple[str, str] | None:
    """Returns the process's output and errors; None if it still runs after INTERVAL seconds."""
    try:
        return process.communicate(timeout=INTERVAL)
    except subprocess.TimeoutExpired:
        return None


def _times(part: Part, case: BenchCase, device: torch.device, seconds: float) -> dict[str, Any]:
    chosen, _ = engine_table.choose([], part.engines)
    setup = _setup(part, device)
    warm_up_engines(chosen, setup)
    rows: dict[str, Any] = {}
    settings = BenchSettings(setup, iterations_per_run=part.calls, seconds=seconds)
    if _TURN in os.environ:
        settings = dataclasses.replace(settings, before_rounds=Turn(Path(os.environ[_TURN])).wait)
    for row in measure(case, chosen, settings).rows:
        rows[row.engine] = {"good": row.agrees}
        if row.wall is not None:
            rows[row.engine] |= {"ms": row.wall.median, "lower": row.wall.lower, "upper": row.wall.upper}
            rows[row.engine]["first_call"] = row.first_call_seconds
        if not row.agrees:
            rows[row.engine]["failure"] = row.failure or "disagrees with eager"
    return {"environment": report.environment(), "engines": rows}


def _memory(part: Part, case: BenchCase, device: torch.device, engine: str) -> dict[str, int | None]:
    setup = _setup(part, device)
    inputs = setup.inputs(case, torch.Generator().manual_seed(1))
    with torch.no_grad():
        model = setup.model(case)
        call = engine_table.ENGINES[engine].prepare_call(model, inputs)
        del model  # for training, the engine has a copy of its own
        for _ in range(WARM_CALLS):
            call(*inputs)
        setup.synchronise()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        for _ in range(CALLS):
            call(*inputs)
        setup.synchronise()
    return {"peak": device_peak_bytes(device)}


def _setup(part: Part, device: torch.device) -> ModelSetup:
    return ModelSetup(part.batch, part.dtype, device, threads=torch.get_num_threads(), training=part.training)


def main(part: str, model: str, device: str, seconds: str, engine: str = "") -> None:
    settings = PARTS[part]
    settings.set_precision()
    (case,) = suites.choose("gpu", [model])
    where = torch.device(device)
    print(json.dumps(_memory(settings, case, where, engine) if engine else _times(settings, case, where, float(seconds))))


if __name__ == "__main__":
    main(*sys.argv[1:])
