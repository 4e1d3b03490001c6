"""Counts random programs until one finds a planted fault: a generator of programs is as good as the faults that it finds."""

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
    """Programs made once and used for every fault."""

    def __init__(self, seeds: Iterable[int]) -> None:
        self._seeds = iter(seeds)
        self._made: list[tuple[int, Program, Expected]] = []

    def __iter__(self) -> Iterator[tuple[int, Program, Expected]]:
        for place in range(2**31):
            if place == len(self._made):
                seed = next(self._seeds, None)
                if seed is None:
                    return
                self._made.append((seed, *generate(seed)))
            yield self._made[place]


def find(planted: Fault, programs: Iterable[tuple[int, Program, Expected]]) -> tuple[int, int, Verdict] | None:
    """How many programs it takes until one disagrees because of the fault, that program's seed, and how it disagrees."""
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
    """Print for every fault after how many programs it is found."""
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
