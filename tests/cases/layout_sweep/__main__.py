"""`python -m cases.layout_sweep`: runs the selected cases, and prints the differences from eager mode. Continues an interrupted run."""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from support import json_lines

from .cases import LAYOUTS, LayoutCase, cases
from .trial import depends_on_layouts, differences, promised_strides, quickly_compiled

RESULTS = Path(".layout_sweep/results.jsonl")
# The number of rows of one layout that are compiled as one function.
TOGETHER = 8

Record = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    torch.set_num_threads(1)
    path = options.results or (RESULTS.with_name("strides.jsonl") if options.strides else RESULTS)
    if options.fresh:
        path.unlink(missing_ok=True)
    known = {record["case"]: record for record in json_lines.load(path)}
    chosen = selected(options)
    remaining = [case for case in chosen if str(case) not in known]
    print(f"{len(chosen)} cases, {len(chosen) - len(remaining)} of them known from {path}", flush=True)
    started = time.monotonic()
    with json_lines.open_to_append(path) as results, promised_strides() if options.strides else quickly_compiled():
        for first in range(0, len(remaining), TOGETHER):
            for record in judged(remaining[first : first + TOGETHER]):
                known[record["case"]] = record
                results.write(json.dumps(record) + "\n")
                if is_bad(record):
                    print(f"{record['case']}: {record['difference']}", flush=True)
            results.flush()
            if first // TOGETHER % 10 == 9:
                print(f"{first + TOGETHER} of {len(remaining)} cases in {time.monotonic() - started:.0f} seconds", flush=True)
    records = [known[str(case)] for case in chosen]
    print(summary(records))
    return int(any(map(is_bad, records)))


def judged(group: list[LayoutCase]) -> list[Record]:
    """Returns a record for each case. For a case that differs from eager mode, it has the difference, and that of torch's own aot_eager."""
    found = differences(group)
    records: list[Record] = []
    for case in group:
        record: Record = {"case": str(case), "layout": case.layout, "difference": found.get(str(case), "")}
        if record["difference"]:
            record["aot_eager"] = differences([case], "aot_eager").get(str(case), "")
            record["eager_depends_on_layouts"] = not record["aot_eager"] and depends_on_layouts(case)
        records.append(record)
    return records


def is_bad(record: Record) -> bool:
    """True for a difference that is neither in aot_eager, nor due to a kernel of eager mode that ignores strides of operands."""
    return bool(record["difference"]) and not record["aot_eager"] and not record["eager_depends_on_layouts"]


def summary(records: list[Record]) -> str:
    kinds = Counter((record["layout"], _kind(record)) for record in records)
    return "\n".join(
        f"{layout}: {kinds[layout, 'same']} as in eager mode, {kinds[layout, 'aot_eager']} that also differ with aot_eager, "
        f"{kinds[layout, 'eager']} for which eager mode reads the operands as if they were contiguous, {kinds[layout, 'bad']} that differ"
        for layout in LAYOUTS
    )


def _kind(record: Record) -> str:
    if not record["difference"]:
        return "same"
    return "bad" if is_bad(record) else "aot_eager" if record["aot_eager"] else "eager"


def selected(options: argparse.Namespace) -> list[LayoutCase]:
    pattern = re.compile(options.match)
    matching = [case for case in cases() if case.layout in options.layouts and pattern.search(str(case))]
    if options.sample is not None:
        indices = set(random.Random(options.seed).sample(range(len(matching)), min(options.sample, len(matching))))
        matching = [case for index, case in enumerate(matching) if index in indices]
    return matching


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m cases.layout_sweep", description=__doc__)
    result.add_argument("--layouts", nargs="+", choices=list(LAYOUTS), default=list(LAYOUTS), help="the memory layouts of the operands")
    result.add_argument("--match", default="", metavar="REGEX", help="only matching cases; names are like 'aten.roll.default, transposed'")
    result.add_argument(
        "--strides", action="store_true", help="check only strides: torch's kernels compute the values, in a tenth of the time"
    )
    result.add_argument("--sample", type=int, metavar="N", help="only N cases, drawn with --seed")
    result.add_argument("--seed", type=int, default=0)
    result.add_argument("--results", type=Path, help=f"file of results; its cases are not run again (default: {RESULTS} or strides.jsonl)")
    result.add_argument("--fresh", action="store_true", help="delete the file of results first")
    return result


if __name__ == "__main__":
    sys.exit(main())
