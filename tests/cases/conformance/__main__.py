"""`python -m cases.conformance`: runs the selected cases, continues an earlier run, and prints the summary."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from pathlib import Path

from support import json_lines

from . import report
from .entries import DATABASES, DTYPES, KINDS, Case, cases
from .expected import EXPECTED, ON_THE_DEVICE
from .pool import run_all

RESULTS = Path(".conformance/results.jsonl")
DEVICE_RESULTS = {"eager": Path(".conformance/device.jsonl"), "lazy": Path(".conformance/device_lazy.jsonl")}
DEVICE_COMMAND = (sys.executable, "-m", "cases.conformance.device_suite")
PAGE = Path("docs/op_coverage.md")


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    selected_cases = selected(options)
    options.results = options.results or DEVICE_RESULTS.get(options.device, RESULTS)
    if options.fresh:
        options.results.unlink(missing_ok=True)
    known = report.load(options.results)
    remaining = [case for case in selected_cases if not _is_known(known.get(str(case)), options)]
    print(f"{len(selected_cases)} cases, {len(selected_cases) - len(remaining)} of them known from {options.results}", flush=True)
    if remaining:
        _run(remaining, known, options)
    summary = report.Summary([known[str(case)] for case in selected_cases], ON_THE_DEVICE if options.device else EXPECTED)
    print(summary.text())
    if options.write_docs:
        is_complete = all(str(case) in known and known[str(case)]["complete"] for case in cases())
        if options.device or not is_complete or len(selected_cases) != len(list(cases())):
            raise SystemExit("docs/op_coverage.md is written by a run of all cases with all their samples")
        PAGE.write_text(report.coverage_page(summary))
    return 0 if summary.good else 1


def _is_known(result: report.Result | None, options: argparse.Namespace) -> bool:
    """True if a case need not run again."""
    if result is None or (options.retry and result["failed"]):
        return False
    return result["complete"] or options.max_samples is not None


def _run(remaining: list[Case], known: dict[str, report.Result], options: argparse.Namespace) -> None:
    """Runs cases. Adds each result to `known` and to the file of results at once."""
    started = time.monotonic()
    done = 0
    with json_lines.open_to_append(options.results) as results:

        def record(result: report.Result) -> None:
            nonlocal done
            done += 1
            results.write(json.dumps(result) + "\n")
            results.flush()
            known[result["case"]] = result
            for line in report.failure_lines(result):
                print(line, flush=True)
            if done % 100 == 0:
                print(f"{done} of {len(remaining)} cases in {time.monotonic() - started:.0f} seconds", flush=True)

        run_all(
            remaining,
            options.shards,
            record,
            max_samples=options.max_samples,
            together=options.together,
            silence_seconds=options.seconds,
            log=options.results,
            command=(*DEVICE_COMMAND, options.device) if options.device else None,
        )


def selected(options: argparse.Namespace) -> list[Case]:
    pattern = re.compile(options.match)
    chosen_cases = [
        case
        for case in cases()
        if case.database in options.db
        and case.dtype in options.dtype
        and case.kind in options.kind
        and (pattern.search(case.name) or pattern.search(str(case)))
    ]
    if options.sample is not None:
        chosen = set(random.Random(options.seed).sample(range(len(chosen_cases)), min(options.sample, len(chosen_cases))))
        chosen_cases = [case for index, case in enumerate(chosen_cases) if index in chosen]
    return chosen_cases


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="python -m cases.conformance", description=__doc__)

    def names(valid_names: list[str]) -> dict[str, object]:
        def parse(text: str) -> list[str]:
            chosen = text.split(",")
            for name in chosen:
                if name not in valid_names:
                    raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(valid_names)}")
            return chosen

        return {"type": parse, "default": valid_names, "metavar": ",".join(valid_names)}

    options.add_argument("--db", **names(list(DATABASES)))
    options.add_argument("--dtype", **names([str(dtype).removeprefix("torch.") for dtype in DTYPES]))
    options.add_argument("--kind", **names(list(KINDS)))
    options.add_argument("--match", default="", metavar="REGEX", help="only entries whose name matches, or cases whose id matches")
    options.add_argument("--sample", type=int, metavar="N", help="only N cases, drawn with --seed")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--max-samples", type=int, metavar="K", help="at most K calls of each case")
    together = "compile up to N calls of a case as one function, once two have passed alone; calls that do not pass are compiled alone"
    options.add_argument("--together", type=int, default=8, metavar="N", help=together)
    options.add_argument("--shards", type=int, default=1, help="processes")
    options.add_argument("--seconds", type=float, default=300.0, help="a call that takes longer fails")
    modes = {"nargs": "?", "const": "eager", "choices": list(DEVICE_RESULTS), "metavar": "MODE"}
    options.add_argument("--device", **modes, help='on the device "jax", not compiled: in "eager" mode (if none is given) or "lazy"')
    defaults = ", ".join(map(str, (RESULTS, *DEVICE_RESULTS.values())))
    options.add_argument("--results", type=Path, help=f"the file of results, whose cases are not run again; by default one of {defaults}")
    options.add_argument("--retry", action="store_true", help="run the cases that failed again")
    options.add_argument("--write-docs", action="store_true", help=f"write {PAGE}")
    options.add_argument("--fresh", action="store_true", help="delete the file of results first")
    return options


if __name__ == "__main__":
    sys.exit(main())
