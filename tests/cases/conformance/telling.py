"""A thousand calls of op_db that show many different facts. `make test` compares one call of each op, and `pytest -m slow
tests/cases/test_conformance.py` the others. `python -m cases.conformance.telling` chooses the calls and writes telling.txt.

The facts of a call are its op with this dtype, this kind of input, operands of these ranks, this value of a keyword. The choice is greedy:
each next call is one that passes, with the most facts that no earlier call shows.
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

# A case, and the index of one of its calls.
Candidate = tuple[Case, int]

CHOSEN = Path(__file__).with_name("telling.txt")
COUNT = 1000
TOGETHER = 10
# The number of calls of a case that are considered; later calls differ only in sizes.
_LOOKED_AT = 40
_KINDS = ("samples", "noncontiguous", "zero_size", "inplace", "out")


def is_of(case: Case) -> bool:
    """True if calls of the case can be chosen."""
    return case.database == "op_db" and case.kind in _KINDS


def groups(further: bool = False) -> list[list[Candidate]]:
    """Returns the chosen calls in groups that are compiled together: the first call of each op, or the further calls."""
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
    """True if the database of this release of torch has the call: telling.txt was chosen with one release."""
    return case.name in entries(case.database) and next(itertools.islice(seeded_trials(case), number, None), None) is not None


def call_of(case: Case, number: int) -> tuple[Runner, Trial]:
    return runner_of(case), next(itertools.islice(seeded_trials(case), number, None))


def seeded_trials(case: Case) -> Iterator[Trial]:
    """Returns the case's trials, with the same values whatever ran before."""
    random.seed(0)
    torch.manual_seed(0)
    return trials(case)


def facts(case: Case, call: Call) -> frozenset[Hashable]:
    """Returns the facts that a call shows about its op."""
    ranks = tuple(min(tensor.dim(), 4) for tensor in call.tensors[:4])
    shapes = {tensor.shape for tensor in call.tensors}
    shown: set[Hashable] = {case.dtype, case.kind, ranks, *(tensor.dtype for tensor in call.tensors)}
    shown |= {"several shapes"} if len(shapes) > 1 else set()
    shown |= {"nothing in it"} if any(not tensor.numel() for tensor in call.tensors) else set()
    # Keywords and literals, with a zero for each digit.
    shape_of_text = "".join("0" if letter.isdigit() else letter for letter in call.text)
    return frozenset((case.name, fact) for fact in shown | {shape_of_text})


def candidates() -> dict[Candidate, frozenset[Hashable]]:
    """Returns the facts of each call that can be chosen. Of calls with the same facts, only the first can be chosen."""
    facts_of_candidates: dict[Candidate, frozenset[Hashable]] = {}
    seen: set[frozenset[Hashable]] = set()
    expected = by_case()
    for case in cases():
        if not is_of(case) or str(case) in expected:
            continue
        try:
            for trial in itertools.islice(seeded_trials(case), _LOOKED_AT):
                shown = facts(case, trial.call)
                # torch.compile takes no `out` of another size than the result's.
                is_supported = case.kind != "out" or trial.call.tensors[-1].numel() > 0
                if is_supported and shown not in seen and can_join(trial) and trial.call.key is not None:
                    facts_of_candidates[case, trial.number] = shown
                seen.add(shown)
        except Exception as error:  # op_db itself raises for some of its cases, with any exception; these cannot be chosen
            print(f"{case}: the database raises {error!r}", flush=True)
    return facts_of_candidates


def choose(count: int) -> list[Candidate]:
    """Chooses calls greedily. A call that does not pass, compiled alone or with others, is replaced by the next best one."""
    remaining: defaultdict[str, dict[Candidate, frozenset[Hashable]]] = defaultdict(dict)
    for (case, number), shown in candidates().items():
        remaining[case.name][case, number] = shown
    gc.freeze()  # garbage collections need not visit these objects
    known: set[Hashable] = set()
    used: Counter[tuple[str, str]] = Counter()
    passing: list[Candidate] = []

    def rank(item: Candidate) -> tuple[int, int]:
        """Orders by the number of new facts, then by how rarely the kind of input and the dtype were chosen."""
        return len(remaining[item[0].name][item] - known), -used[item[0].kind, item[0].dtype]

    # Ops share no facts: the best call changes only for an op whose call was chosen.
    best = {name: max(items, key=rank) for name, items in remaining.items()}
    while len(passing) < count and best:
        group = []
        for name in sorted(best, key=lambda name: rank(best[name]), reverse=True)[: min(TOGETHER, count - len(passing))]:
            group.append(max(remaining[name], key=rank))
        for item, outcome in zip(group, run_together([call_of(*item) for item in group]), strict=True):
            name, shown = item[0].name, remaining[item[0].name].pop(item)
            if outcome.verdict == "pass":
                passing.append(item)
                known |= shown
                used[item[0].kind, item[0].dtype] += 1
            del best[name]
            if remaining[name]:
                best[name] = max(remaining[name], key=rank)
        print(f"{len(passing)} chosen", flush=True)
    return passing


def main() -> int:
    prepare()
    numbers: defaultdict[Case, list[int]] = defaultdict(list)
    for case, number in choose(COUNT):
        numbers[case].append(number)
    lines = [f"{case.name} {case.dtype} {case.kind} {' '.join(map(str, sorted(indices)))}" for case, indices in numbers.items()]
    CHOSEN.write_text("\n".join(sorted(lines)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
