"""`python -m commands.lower_everywhere`: lowers the chosen cases, and prints the faults."""

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
            for platform, result in outcomes.items():
                if text := fault(case, platform, result, is_compiled=platform == options.compile):
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
    """Returns a random sample of the cases whose id matches: one in `part` of each kind, in order."""
    matching = [case for case in cases() if re.search(match, str(case))]
    sample: set[Case] = set()
    for kind in ("model", "op"):
        of_kind = [case for case in matching if case.kind == kind]
        sample |= set(random.Random(seed).sample(of_kind, -(-len(of_kind) // part)))
    return [case for case in matching if case in sample]


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m commands.lower_everywhere", description=__doc__)
    parser.add_argument("--match", default="", metavar="REGEX", help='only cases whose id matches, e.g. "op/linalg" or "model/"')
    parser.add_argument("--part", type=int, default=1, metavar="N", help="one case in N, drawn with --seed")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", choices=["tpu"], help="also compile with libtpu, the compiler for TPUs; an interrupted run continues")
    parser.add_argument("--libtpu", type=Path, metavar="FOLDER", help="the folder with libtpu; by default that of make tpu-programs")
    parser.add_argument("--fresh", action="store_true", help="ignore the results of an earlier run of this code")
    parser.add_argument("--results", type=Path, help="the file of compiled cases; by default one for each state of the sources")
    return parser


if __name__ == "__main__":
    sys.exit(main())
