"""Facts as JSON lines. Each fact is written as soon as it is known, so that a later crash of the process loses no fact."""

from __future__ import annotations

import contextlib
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

# Set by the driver for the processes that it starts.
FILE_VARIABLE, START_VARIABLE, DEVICE_VARIABLE = "GPU_REPORT_FILE", "GPU_REPORT_START", "GPU_REPORT_DEVICE"
# A longer error message or traceback loses its beginning.
LONGEST_TEXT = 1500


def device() -> torch.device:
    """The device that the parts use: cuda, or cpu in a rehearsal on a machine without a GPU."""
    return torch.device(os.environ.get(DEVICE_VARIABLE, "cuda"))


def write(part: str, what: str, **fields: Any) -> None:
    """Appends a line to the driver's file: seconds since the driver's start, the part, the fact's name and its fields."""
    seconds = round(time.time() - float(os.environ[START_VARIABLE]), 1)
    line = json.dumps({"seconds": seconds, "part": part, "what": what, **fields}, default=str)
    with Path(os.environ[FILE_VARIABLE]).open("a") as file:
        file.write(line + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """Returns all facts of a file. A last line that a crash has cut off is ignored."""
    facts = []
    for line in file.read_text().splitlines() if file.exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            facts.append(json.loads(line))
    return facts


@contextlib.contextmanager
def fact(part: str, what: str) -> Iterator[dict[str, Any]]:
    """Writes one fact on exit. The caller fills the dict; its key `ok` defaults to True.

    An exception is recorded and suppressed, so that the part continues with its next fact.
    """
    fields: dict[str, Any] = {}
    start = time.monotonic()
    try:
        yield fields
    except Exception as error:
        fields["ok"] = False
        fields["error"] = f"{type(error).__name__}: {error}"[-LONGEST_TEXT:]
        fields["traceback"] = traceback.format_exc()[-LONGEST_TEXT:]
    fields.setdefault("ok", True)
    write(part, what, took_seconds=round(time.monotonic() - start, 2), **fields)


def synchronize() -> None:
    if device().type == "cuda":
        torch.cuda.synchronize()


def milliseconds(call: Callable[[], Any], calls: int = 30) -> dict[str, float]:
    """Returns the milliseconds per call: `ms` with one wait for the device after `calls` calls, `host_ms` without it; the median of five.

    In a rehearsal on the CPU, a long call is timed once.
    """
    call(), call()
    synchronize()
    start = time.perf_counter()
    call()
    synchronize()
    if (single := time.perf_counter() - start) > 0.02 and device().type == "cpu":
        return {"ms": round(single * 1e3, 4), "host_ms": round(single * 1e3, 4)}
    samples = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(calls):
            call()
        host = time.perf_counter() - start
        synchronize()
        samples.append(((time.perf_counter() - start) / calls * 1e3, host / calls * 1e3))
    samples.sort()
    return {"ms": round(samples[2][0], 4), "host_ms": round(samples[2][1], 4)}


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over the norm of the expected tensor, in float64. NaN if a tensor has a NaN."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-30))
