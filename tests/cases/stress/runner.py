"""Runs jobs in threads. At intervals, the threads wait while memory and leftover objects are counted."""

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

# The interval of Python's switches between threads.
SWITCH_SECONDS = 1e-6
# The number of times that a thread runs each of its jobs before the first measurement. Then all programs have been compiled.
FIRST_ROUNDS = 14
# The same for jobs that compile every time.
FIRST_NEW_FUNCTIONS = 4
# The allowed growth of memory. TorchDynamo itself keeps about 0.1 MB for each compiled function, because finalizers of the functions hold
# its guards. And the heaps of glibc, one for each thread, grow for some time.
MEGABYTES_PER_FUNCTION = 0.3
MEGABYTES = 100


@dataclass
class Sample:
    """A measurement.

    Attributes:
        seconds: the time since the start.
        megabytes: the memory of the process.
        objects: the number of objects of dynaxla and JAX, by class.
        compiled: the number of functions compiled so far.
    """

    seconds: float
    megabytes: float
    objects: Counter[str]
    compiled: int


@dataclass
class Report:
    """The results of a run."""

    counts: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    @property
    def grown(self) -> list[str]:
        """Descriptions of objects and memory that have grown between the first rounds and the end."""
        if len(self.samples) < 2:
            return ["the run was too short to tell"]
        first, last = self.samples[0], self.samples[-1]
        descriptions = [
            f"{name}: {first.objects[name]}, then {count}" for name, count in last.objects.items() if count > first.objects[name] * 1.1 + 20
        ]
        allowed = MEGABYTES + MEGABYTES_PER_FUNCTION * (last.compiled - first.compiled)
        if last.megabytes - first.megabytes > allowed:
            descriptions.append(f"memory: {first.megabytes:.0f} MB, then {last.megabytes:.0f} MB; {allowed:.0f} MB more are allowed")
        return descriptions


def run(seconds: float, threads: int, seed: int, backend: str) -> Report:
    """Runs threads, and returns a report.

    Args:
        seconds: the duration after the first rounds.
        threads: the number of threads.
        seed: selects values and the order of jobs.
        backend: dynaxla, or another backend to find defects of torch itself. Steps are compiled by dynaxla in any case.
    """

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
    # All threads start together. Later, they wait at the barrier whenever the main thread takes a sample.
    barrier = threading.Barrier(len(work) + 1)
    is_sampling, ending = threading.Event(), threading.Event()
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
        barrier.wait()
        for name in first:
            work_on(number, name, mine[name])
        barrier.wait()
        barrier.wait()
        while not ending.is_set():
            if is_sampling.is_set():
                barrier.wait()
                barrier.wait()
            name = choose(mine, draw)
            work_on(number, name, mine[name])
        barrier.abort()

    running_threads = [threading.Thread(target=_serve_until_the_end, args=(serve, number, mine)) for number, mine in enumerate(work, 1)]
    for running_thread in running_threads:
        running_thread.start()
    try:
        with _ignore_broken_barrier():
            barrier.wait()
            run_start = start = time.monotonic()
            for share in (0.0, 0.25, 0.5, 0.75, 1.0):
                if share:
                    ending.wait(max(0.0, start + share * seconds - time.monotonic()))
                    is_sampling.set()
                barrier.wait()  # the first time, all threads have run the first rounds
                is_sampling.clear()
                report.samples.append(_sample(run_start, report))
                if not share:
                    start = time.monotonic()
                barrier.wait()
    finally:
        ending.set()
        barrier.abort()
        for running_thread in running_threads:
            running_thread.join()


class _ignore_broken_barrier:
    """Suppresses the error of the barrier, which is aborted when a thread ends."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, *_: Any) -> bool:
        return kind is threading.BrokenBarrierError


def _serve_until_the_end(serve: Callable[..., None], *args: Any) -> None:
    with _ignore_broken_barrier():
        serve(*args)


def _sample(start: float, report: Report) -> Sample:
    gc.collect()
    objects: Counter[str] = Counter()
    for item in gc.get_objects():
        kind = type(item)
        if issubclass(kind, jax.core.Tracer) or str(kind.__module__).startswith("dynaxla"):
            objects[f"{kind.__module__}.{kind.__qualname__}"] += 1
    return Sample(time.monotonic() - start, _megabytes(), objects, report.counts["new function"])


def _megabytes() -> float:
    """Returns the resident memory of the process, after free memory of the heap is returned to the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096 / 1e6
    except OSError:  # not Linux
        return 0.0
