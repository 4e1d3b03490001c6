"""Runs many programs in child processes. Records each verdict at once, and continues an interrupted run."""

from __future__ import annotations

import dataclasses
import gc
import json
import multiprocessing
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from support import json_lines

from .features import compared, features
from .generator import generate
from .judge import judge
from .minimise import minimise
from .observed import Expected
from .program import Program, reproducer
from .rounded import ROUNDED, everywhere

Record = dict[str, Any]

# A process that gives no answer within this time hangs. A process is replaced after this number of programs.
SILENCE_SECONDS = 900
PROGRAMS_PER_PROCESS = 500
OUTCOMES = ("agrees", "torch", "refused", "disagrees", "crashes", "hangs")
BAD = ("refused", "disagrees", "crashes", "hangs")


def seeds(first: int, count: int) -> range:
    """Returns the seeds of a run's programs. Runs with different seeds have no program in common."""
    return range(first * 1_000_000, first * 1_000_000 + count)


def run_one(seed: int, smallest: bool = True, rounded: bool = False) -> Record:
    """Generates and judges a program, and returns its record.

    Args:
        seed: the seed of the program.
        smallest: for a program that fails, look for a smaller one that fails in the same way.
        rounded: use rounded sizes.
    """
    program, expected = generate(seed, rounded)
    if not rounded:
        return _run(seed, program, expected, smallest)
    with everywhere() as outcomes:
        record = _run(seed, dataclasses.replace(program, dynamic=True), expected, smallest)
    return record | {"sizes": sorted(set(outcomes))}


def _run(seed: int, program: Program, expected: Expected, smallest: bool) -> Record:
    verdict = judge(program, expected)
    record: Record = {"seed": seed, "outcome": verdict.outcome}
    record |= {"ops": Counter(step.op for step in program.steps), "features": sorted(features(program, expected))}
    record["compared"] = compared(expected) if verdict.outcome == "agrees" else 0
    if verdict.outcome != "agrees":
        record |= {"kind": verdict.kind, "detail": verdict.detail[:2000]}
    if verdict.outcome in BAD:
        small = minimise(program, verdict) if smallest else program
        record["reproducer"] = reproducer(small)
    return record


def load(path: Path) -> dict[int, Record]:
    """Returns the records of an earlier run, by seed."""
    return {record["seed"]: record for record in json_lines.load(path)}


def run_all(wanted: Iterable[int], shards: int, path: Path, seen: Callable[[Record], None], rounded: bool = False) -> None:
    """Runs the programs with these seeds.

    Args:
        wanted: the seeds.
        shards: the number of processes.
        path: the file that gets a line for each record.
        seen: called with each record, by one thread at a time.
        rounded: use rounded sizes.
    """
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for seed in wanted:
        waiting.put(seed)
    lock = threading.Lock()
    with json_lines.open_to_append(path) as results:

        def serve() -> None:
            worker = _Worker(rounded)
            while True:
                try:
                    seed = waiting.get_nowait()
                except queue.Empty:
                    worker.stop()
                    return
                record = worker.run(seed)
                with lock:
                    results.write(json.dumps(record) + "\n")
                    results.flush()
                    seen(record)

        threads = [threading.Thread(target=serve) for _ in range(shards)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class _Worker:
    """A process that judges programs. It is replaced when it dies, hangs, or has judged many programs."""

    def __init__(self, rounded: bool) -> None:
        self._rounded = rounded
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._done = 0

    def run(self, seed: int) -> Record:
        if self._process is None or self._connection is None:
            context = multiprocessing.get_context("spawn")
            self._connection, child_connection = context.Pipe()
            self._process = context.Process(target=_work, args=(child_connection, self._rounded), daemon=True)
            self._process.start()
            child_connection.close()
        self._connection.send(seed)
        outcome = "hangs"
        try:
            if self._connection.poll(SILENCE_SECONDS):
                record: Record = self._connection.recv()
                self._done += 1
                if self._done % PROGRAMS_PER_PROCESS == 0:
                    self.stop()
                return record
        except EOFError:
            outcome = "crashes"
        self.stop()
        return {"seed": seed, "outcome": outcome, "kind": outcome, "detail": f"python -m cases.random_programs --only {seed}", "ops": {}}

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def _work(connection: Connection, rounded: bool) -> None:
    torch.set_num_threads(1)
    done = 0
    while True:
        connection.send(run_one(connection.recv(), rounded=rounded))
        done += 1
        if done % 100 == 0:
            torch._dynamo.reset()
            gc.collect()


def summary(records: Iterable[Record]) -> str:
    """Returns a text with counts of outcomes, ops and features."""
    records = list(records)
    outcomes = Counter(record["outcome"] for record in records)
    agreeing = [record for record in records if record["outcome"] == "agrees"]
    ops = Counter()
    feature_counts: Counter[str] = Counter()
    for record in agreeing:
        ops.update(record["ops"])
        feature_counts.update(record["features"])
    lines = [f"{len(records)} programs: " + ", ".join(f"{outcomes[name]} {name}" for name in OUTCOMES if outcomes[name])]
    lines.append(f"{sum(record['compared'] for record in agreeing)} values compared; {sum(ops.values())} steps of {len(ops)} kinds:")
    lines.append("  " + ", ".join(f"{op} {count}" for op, count in ops.most_common()))
    lines.append("programs with:")
    lines += [f"  {count:6} {name}" for name, count in feature_counts.most_common()]
    if any("sizes" in record for record in records):
        reasons = Counter(reason for record in records for reason in record.get("sizes", ()))
        lines.append(f"{reasons.pop(ROUNDED, 0)} programs with graphs for rounded sizes; reasons for exact sizes:")
        lines += [f"  {count:6} {reason}" for reason, count in reasons.most_common()]
    for outcome in ("torch", *BAD):
        kinds = Counter(record["kind"] for record in records if record["outcome"] == outcome)
        if kinds:
            lines.append(f"{outcome}: " + ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    bad = [str(record["seed"]) for record in records if record["outcome"] in BAD]
    if bad:
        lines.append("seeds that failed: " + " ".join(bad))
    return "\n".join(lines)
