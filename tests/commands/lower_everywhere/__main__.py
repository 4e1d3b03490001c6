"""`python -m commands.lower_everywhere`: lower what is asked for, and print what is wrong."""

from __future__ import annotations

import argparse
import gc
import random
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from cases.conformance.trial import quiet
from commands.tpu_programs import libtpu

from . import tpu_compiler
from .cases import PLATFORMS, Case, cases
from .trial import Outcome, fault, outcome


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    wanted = chosen(options.match, options.part, options.seed)
    started = time.monotonic()
    count = 0
    try:
        for case, outcomes in _compiled(wanted, options) if options.compile else _lowered(wanted):
            for platform, found in outcomes.items():
                if text := fault(case, platform, found, is_compiled=platform == options.compile):
                    count += 1
                    print(text, flush=True)
    except libtpu.LibtpuError as error:
        raise SystemExit(str(error)) from None
    print(f"{len(wanted)} cases in {time.monotonic() - started:.0f} seconds; {count} faults")
    return 1 if count else 0


def _lowered(wanted: Sequence[Case]) -> Iterator[tuple[Case, dict[str, Outcome]]]:
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        quiet()
        for case in wanted:
            yield case, {platform: outcome(case, platform) for platform in PLATFORMS}
            if case.kind == "model":
                gc.collect()


def _compiled(wanted: Sequence[Case], options: argparse.Namespace) -> Iterator[tuple[Case, dict[str, Outcome]]]:
    folder = options.libtpu or libtpu.folder()
    libtpu.environment(folder)  # raises if there is none
    path = options.results or tpu_compiler.results_file(folder)
    if options.fresh:
        path.unlink(missing_ok=True)
    counts: Counter[str] = Counter()
    for case, outcomes in tpu_compiler.compile_all(wanted, path, folder):
        counts[outcomes[options.compile].kind or "compiled"] += 1
        yield case, outcomes
    print(f"for {options.compile}: {', '.join(f'{count} {kind}' for kind, count in counts.items())} ({path})")


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
    made.add_argument("--compile", choices=["tpu"], help="also compile with libtpu, the compiler for TPUs; an interrupted run continues")
    made.add_argument("--libtpu", type=Path, metavar="FOLDER", help="the folder with libtpu; by default that of make tpu-programs")
    made.add_argument("--fresh", action="store_true", help="forget what an earlier run of this code has compiled")
    made.add_argument("--results", type=Path, help="the file of compiled cases; by default one for each state of the sources")
    return made


if __name__ == "__main__":
    sys.exit(main())
