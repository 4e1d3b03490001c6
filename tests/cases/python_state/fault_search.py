"""Counts random changes of Python state until one of them finds a planted fault in the guards."""

from __future__ import annotations

from collections.abc import Sequence

from cases.faults import Fault
from cases.faults.guards import FAULTS

from .cases import Verdict, draw_case, judge
from .choices import SeededChoices


def find(planted: Fault, seeds: Sequence[int]) -> tuple[int, int, Verdict] | None:
    """Returns the number of cases up to the first one that fails because of the fault, its seed, and its verdict; None if none fails."""
    for count, seed in enumerate(seeds, start=1):
        case = draw_case(SeededChoices(seed))
        with planted():
            verdict = judge(case, bool(seed % 2))
        if verdict.problem and not judge(draw_case(SeededChoices(seed)), bool(seed % 2)).problem:
            return count, seed, verdict
    return None


def main(names: Sequence[str], seeds: Sequence[int]) -> int:
    """Prints the number of cases that find each fault."""
    missed = 0
    for name in names or FAULTS:
        found = find(FAULTS[name], seeds)
        missed += found is None
        print(f"{name:50}", "not found" if found is None else f"{found[0]:5}  seed {found[1]}  {found[2].problem}", flush=True)
    print(f"{len(names or FAULTS) - missed} of {len(names or FAULTS)} faults found")
    return int(bool(missed))
