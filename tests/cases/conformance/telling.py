"""The thousand most telling calls of op_db: `python -m cases.conformance.telling` chooses them and writes telling.txt. One of each op is
compared by `make test`, the others by `pytest -m slow tests/cases/test_conformance.py`.

A call shows facts: its op with this dtype, this kind of input, operands of these ranks, this value of a keyword. The calls are chosen
greedily: each is one that passes, with the most facts that no call chosen before it shows.
"""

from __future__ import annotations

import gc
import itertools
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator
from pathlib import Path

import torch

from .calls import Call
from .entries import Case, Trial, cases, entries, trials
from .expected import by_case
from .trial import Runner, can_join, run_together
from .worker import prepare, runner_of

# A case, and the number of one of its calls.
Candidate = tuple[Case, int]

CHOSEN = Path(__file__).with_name("telling.txt")
COUNT = 1000
TOGETHER = 10
# Calls of a case that are looked at; what follows differs from them in sizes.
_LOOKED_AT = 40
_KINDS = ("samples", "noncontiguous", "zero_size", "inplace", "out")


def is_of(case: Case) -> bool:
    """Whether its calls are such as can be chosen."""
    return case.database == "op_db" and case.kind in _KINDS


def groups(further: bool = False) -> list[list[Candidate]]:
    """The calls that were chosen, so many as are compiled together: one of each op, or those that are further ones of an op."""
    calls: list[Candidate] = []
    seen: set[str] = set()
    for line in CHOSEN.read_text().splitlines():
        name, dtype, kind, *numbers = line.split()
        for number in numbers:
            if (name in seen) == further:
                calls.append((Case("op_db", name, dtype, kind), int(number)))
            seen.add(name)
    return [calls[first : first + TOGETHER] for first in range(0, len(calls), TOGETHER)]


def is_there(case: Case, number: int) -> bool:
    """Whether this torch's database has such a call: telling.txt was chosen from another one's."""
    return case.name in entries(case.database) and next(itertools.islice(seeded_trials(case), number, None), None) is not None


def call_of(case: Case, number: int) -> tuple[Runner, Trial]:
    return runner_of(case), next(itertools.islice(seeded_trials(case), number, None))


def seeded_trials(case: Case) -> Iterator[Trial]:
    """The same values whatever ran before."""
    random.seed(0)
    torch.manual_seed(0)
    return trials(case)


def facts(case: Case, call: Call) -> frozenset[Hashable]:
    """What a call shows of its op."""
    ranks = tuple(min(tensor.dim(), 4) for tensor in call.tensors[:4])
    shapes = {tensor.shape for tensor in call.tensors}
    found: set[Hashable] = {case.dtype, case.kind, ranks, *(tensor.dtype for tensor in call.tensors)}
    found |= {"several shapes"} if len(shapes) > 1 else set()
    found |= {"nothing in it"} if any(not tensor.numel() for tensor in call.tensors) else set()
    # Keywords and literals, whatever the numbers are.
    shape_of_text = "".join("0" if letter.isdigit() else letter for letter in call.text)
    return frozenset((case.name, fact) for fact in found | {shape_of_text})


def candidates() -> dict[Candidate, frozenset[Hashable]]:
    """The facts of each call that could be chosen: the first of those that show the same."""
    found: dict[Candidate, frozenset[Hashable]] = {}
    seen: set[frozenset[Hashable]] = set()
    expected = by_case()
    for case in cases():
        if not is_of(case) or str(case) in expected:
            continue
        try:
            for trial in itertools.islice(seeded_trials(case), _LOOKED_AT):
                shown = facts(case, trial.call)
                # torch.compile takes no `out` of another size than the result's.
                fits = case.kind != "out" or trial.call.tensors[-1].numel() > 0
                if fits and shown not in seen and can_join(trial) and trial.call.key is not None:
                    found[case, trial.number] = shown
                seen.add(shown)
        except Exception as error:  # op_db itself fails for some of its cases, in whatever way; those cannot be chosen
            print(f"{case}: the database raises {error!r}", flush=True)
    return found


def choose(count: int) -> list[Candidate]:
    """Greedily: what does not pass, alone or in company, makes room for the next best."""
    left: defaultdict[str, dict[Candidate, frozenset[Hashable]]] = defaultdict(dict)
    for (case, number), shown in candidates().items():
        left[case.name][case, number] = shown
    gc.freeze()  # collections need not look at all these again
    known: set[Hashable] = set()
    used: Counter[tuple[str, str]] = Counter()
    passing: list[Candidate] = []

    def rank(item: Candidate) -> tuple[int, int]:
        """Among equals, the kind of input and dtype that has been chosen least."""
        return len(left[item[0].name][item] - known), -used[item[0].kind, item[0].dtype]

    # An op's facts are its own: only where something was chosen is there another best.
    best = {name: max(items, key=rank) for name, items in left.items()}
    while len(passing) < count and best:
        group = []
        for name in sorted(best, key=lambda name: rank(best[name]), reverse=True)[: min(TOGETHER, count - len(passing))]:
            group.append(max(left[name], key=rank))
        for item, outcome in zip(group, run_together([call_of(*item) for item in group]), strict=True):
            name, shown = item[0].name, left[item[0].name].pop(item)
            if outcome.verdict == "pass":
                passing.append(item)
                known |= shown
                used[item[0].kind, item[0].dtype] += 1
            del best[name]
            if left[name]:
                best[name] = max(left[name], key=rank)
        print(f"{len(passing)} chosen", flush=True)
    return passing


def main() -> int:
    prepare()
    numbers: defaultdict[Case, list[int]] = defaultdict(list)
    for case, number in choose(COUNT):
        numbers[case].append(number)
    lines = [f"{case.name} {case.dtype} {case.kind} {' '.join(map(str, sorted(places)))}" for case, places in numbers.items()]
    CHOSEN.write_text("\n".join(sorted(lines)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
