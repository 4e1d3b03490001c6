"""`python -m cases.python_state`: compares functions before and after a random change of state, or looks for planted faults."""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import torch

from .cases import draw_case, judge, judge_compiled
from .choices import SeededChoices


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    torch.set_num_threads(1)
    first = options.seed * 1_000_000
    if options.faults is not None:
        from . import fault_search

        return fault_search.main(options.faults, range(first, first + options.most))
    seeds = [options.only] if options.only is not None else range(first, first + options.count)
    outcomes: Counter[str] = Counter()
    for number, seed in enumerate(seeds):
        case = draw_case(SeededChoices(seed))
        verdict = judge(case, bool(seed % 2))
        outcomes["refused" if verdict.refused else "differs" if verdict.differs else "the same"] += 1
        if number % max(1, len(seeds) // options.compiled) == 0 and not verdict.problem:
            verdict = judge_compiled(draw_case(SeededChoices(seed)))
            outcomes["compiled"] += 1
        if verdict.problem:
            outcomes["wrong"] += 1
            print(f"seed {seed}: {verdict.problem} ({case.change[0]})\n{case.text}", flush=True)
        if options.only is not None:
            print(case.text, case.change[0], verdict, sep="\n")
    print(", ".join(f"{count} {name}" for name, count in outcomes.items()))
    return int(bool(outcomes["wrong"]))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m cases.python_state", description=__doc__)
    result.add_argument("--count", type=int, default=5000, help="number of cases")
    result.add_argument("--seed", type=int, default=0, help="selects the cases")
    result.add_argument("--compiled", type=int, default=300, help="number of cases that are also compiled and run")
    result.add_argument("--only", type=int, metavar="SEED", help="print and judge the case with this seed")
    result.add_argument("--faults", nargs="*", metavar="NAME", help="plant faults and count cases until each is found")
    result.add_argument("--most", type=int, default=3000, help="with --faults: maximum number of cases for each fault")
    return result


if __name__ == "__main__":
    sys.exit(main())
