"""Has threads do their jobs for some time, and looks from time to time, while they wait, at what they have left behind."""

from __future__ import annotations

import ctypes
import gc
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import torch

from .jobs import Shared, choose, jobs

# Of Python's switches between threads.
SWITCH_SECONDS = 1e-6
# How often a thread does each of its jobs before anything is measured: programs for all that occurs have been made then.
FIRST_ROUNDS = 14
# Of those that compile every time.
FIRST_NEW_FUNCTIONS = 4
# What the process may grow by: TorchDynamo itself keeps about 0.1 MB of each function that it has compiled (its guards are held by
# finalizers of the functions that they look at), and glibc's arenas, one for each thread, need some time to settle.
MEGABYTES_PER_FUNCTION = 0.3
MEGABYTES = 100


@dataclass
class Sample:
    """What there is at one moment. Attributes: seconds (since the start); megabytes; objects (ours and JAX's, by class); compiled (how
    many functions have been)."""

    seconds: float
    megabytes: float
    objects: Counter[str]
    compiled: int


@dataclass
class Report:
    """What came of a run."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def grown(self) -> list[str]:
        """What there was more of at the end than after the first rounds."""
        if len(self.samples) < 2:
            return ["the run was too short to tell"]
        first, last = self.samples[0], self.samples[-1]
        found = [
            f"{name}: {first.objects[name]}, then {count}" for name, count in last.objects.items() if count > first.objects[name] * 1.1 + 20
        ]
        allowed = MEGABYTES + MEGABYTES_PER_FUNCTION * (last.compiled - first.compiled)
        if last.megabytes - first.megabytes > allowed:
            found.append(f"memory: {first.megabytes:.0f} MB, then {last.megabytes:.0f} MB; {allowed:.0f} MB more are allowed")
        return found


def run(seconds: float, threads: int, seed: int, backend: str) -> Report:
    """backend: dynaxla, or another one of torch's, to see what is torch's own fault (steps are dynaxla's all the same)."""

    def compile(function: Any, **settings: Any) -> Any:
        if not backend.startswith("dynaxla"):
            settings.pop("options", None)
        return torch.compile(function, backend=backend, **settings)

    report = Report()
    shared = Shared(compile)
    work = [jobs(number, seed, shared, compile) for number in range(1, threads + 1)]
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        _run(work, seconds, seed, report)
    finally:
        sys.setswitchinterval(before)
    return report


def _run(work: list[dict[str, Callable[[], None]]], seconds: float, seed: int, report: Report) -> None:
    # All threads begin at once; afterwards they meet whenever the main thread wants to look.
    meeting = threading.Barrier(len(work) + 1)
    wanted, ending = threading.Event(), threading.Event()
    lock = threading.Lock()

    def work_on(number: int, name: str, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException:
            with lock:
                report.failures.append(f"thread {number}, {name}: {traceback.format_exc()}")
                if len(report.failures) > 20:
                    ending.set()
        with lock:
            report.counts[name] += 1

    def serve(number: int, mine: dict[str, Callable[[], None]]) -> None:
        draw = random.Random(seed * 1000 + number)
        first = [name for name in mine for _ in range(FIRST_NEW_FUNCTIONS if name == "new function" else FIRST_ROUNDS)]
        draw.shuffle(first)
        meeting.wait()
        for name in first:
            work_on(number, name, mine[name])
        meeting.wait()
        meeting.wait()
        while not ending.is_set():
            if wanted.is_set():
                meeting.wait()
                meeting.wait()
            name = choose(mine, draw)
            work_on(number, name, mine[name])
        meeting.abort()

    members = [threading.Thread(target=_until_the_end, args=(serve, number, mine)) for number, mine in enumerate(work, 1)]
    for member in members:
        member.start()
    try:
        with _ended():
            meeting.wait()
            begun = start = time.monotonic()
            for share in (0.0, 0.25, 0.5, 0.75, 1.0):
                if share:
                    ending.wait(max(0.0, start + share * seconds - time.monotonic()))
                    wanted.set()
                meeting.wait()  # at first when all threads have done each of their jobs some times
                wanted.clear()
                report.samples.append(_sample(begun, report))
                if not share:
                    start = time.monotonic()
                meeting.wait()
    finally:
        ending.set()
        meeting.abort()
        for member in members:
            member.join()


class _ended:
    """Nobody waits any more once a thread has ended."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, *_: Any) -> bool:
        return kind is threading.BrokenBarrierError


def _until_the_end(serve: Callable[..., None], *args: Any) -> None:
    with _ended():
        serve(*args)


def _sample(start: float, report: Report) -> Sample:
    gc.collect()
    objects: Counter[str] = Counter()
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, jax.core.Tracer) or str(kind.__module__).startswith("dynaxla"):
            objects[f"{kind.__module__}.{kind.__qualname__}"] += 1
    return Sample(time.monotonic() - start, _megabytes(), objects, report.counts["new function"])


def _megabytes() -> float:
    """What the process holds, without what its heap has free."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 1e6
    except OSError:  # not Linux
        return 0.0
