"""Counts random programs until one of them finds a planted fault, to measure the generator."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence

import torch

from cases.faults import Fault
from cases.faults.ops import FAULTS

from .generator import generate
from .judge import Verdict, judge
from .observed import Expected
from .program import Program


class Programs:
    """Programs that are generated once and used for all faults."""

    def __init__(self, seeds: Iterable[int]) -> None:
        self._seeds = iter(seeds)
        self._generated: list[tuple[int, Program, Expected]] = []

    def __iter__(self) -> Iterator[tuple[int, Program, Expected]]:
        for index in range(2**31):
            if index == len(self._generated):
                seed = next(self._seeds, None)
                if seed is None:
                    return
                self._generated.append((seed, *generate(seed)))
            yield self._generated[index]


def find(planted: Fault, programs: Iterable[tuple[int, Program, Expected]]) -> tuple[int, int, Verdict] | None:
    """Returns the number of programs up to the first one that disagrees because of the fault, its seed, and its verdict."""
    for count, (seed, candidate, expected) in enumerate(programs, start=1):
        with planted():
            verdict = judge(candidate, expected)
        if count % 20 == 0:
            torch._dynamo.reset()
            gc.collect()
        if verdict.outcome == "disagrees" and judge(candidate, expected).outcome == "agrees":
            return count, seed, verdict
    return None


def main(names: Sequence[str], seeds: Iterable[int]) -> int:
    """Prints the number of programs that find each fault."""
    programs = Programs(seeds)
    missed = []
    for name in names or FAULTS:
        found = find(FAULTS[name], programs)
        if found is None:
            missed.append(name)
            print(f"{name:50} not found", flush=True)
            continue
        count, seed, verdict = found
        print(f"{name:50} {count:5}  seed {seed}  {verdict.kind}", flush=True)
    print(f"{len(names or FAULTS) - len(missed)} of {len(names or FAULTS)} faults found")
    return int(bool(missed))
