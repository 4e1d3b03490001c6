"""`python -m commands.lower_everywhere`: lower what is asked for, and print what is wrong."""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
import warnings

import torch

from cases.conformance.trial import quiet

from .cases import Case, cases
from .trial import faults


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    torch.set_num_threads(1)
    wanted = chosen(options.match, options.part, options.seed)
    started = time.monotonic()
    found = []
    with warnings.catch_warnings():
        quiet()
        for case in wanted:
            for text in faults(case):
                found.append(text)
                print(text, flush=True)
    print(f"{len(wanted)} cases in {time.monotonic() - started:.0f} seconds; {len(found)} faults")
    return 1 if found else 0


def chosen(match: str = "", part: int = 1, seed: int = 0) -> list[Case]:
    """A part of the cases whose id this finds, drawn at random: one in so many of each kind, in their order."""
    found = [case for case in cases() if re.search(match, str(case))]
    drawn: set[Case] = set()
    for kind in ("model", "op"):
        own = [case for case in found if case.kind == kind]
        drawn |= set(random.Random(seed).sample(own, -(-len(own) // part)))
    return [case for case in found if case in drawn]


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m commands.lower_everywhere", description=__doc__)
    made.add_argument("--match", default="", metavar="REGEX", help='only cases that this finds, e.g. "op/linalg" or "model/"')
    made.add_argument("--part", type=int, default=1, metavar="N", help="one case in N, drawn with --seed")
    made.add_argument("--seed", type=int, default=0)
    return made


if __name__ == "__main__":
    sys.exit(main())
