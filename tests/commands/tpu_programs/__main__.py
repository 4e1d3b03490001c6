"""`python -m commands.tpu_programs`: compiles the cells, and writes the page or compares with the budgets. Continues an interrupted run."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

from commands.compiled_programs import budgets, processes, results

from . import libtpu, report
from .cells import BUDGETS, LIMITS, cells

COMMAND = (sys.executable, "-m", "commands.tpu_programs.child")


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    wanted = [cell for cell in cells() if re.search(options.match, str(cell))]
    is_part = len(wanted) < len(list(cells()))
    if is_part and not (options.check or options.accept):
        raise SystemExit(f"{report.PAGE} has all cells: with --match give --check or --accept")
    folder = options.libtpu or libtpu.folder()
    path = options.results or libtpu.FOLDER / f"results-{results.code(Path(__file__).parent)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        path.unlink(missing_ok=True)
    started = time.monotonic()
    try:
        environment = libtpu.environment(folder)
    except libtpu.LibtpuError as error:
        raise SystemExit(str(error)) from None
    results_by_cell = processes.compile_all(wanted, lambda cell: cell.group, path, COMMAND, environment)
    print(f"{len(results_by_cell)} cells in {time.monotonic() - started:.0f} seconds ({path})")
    if options.accept:
        budgets.save(results_by_cell, BUDGETS)
    exceeded = list(LIMITS.exceeded(results_by_cell, budgets.load(BUDGETS))) if options.check or options.accept else []
    failed = [f"{name}: {result['error']}" for name, result in results_by_cell.items() if "error" in result]
    print("\n".join([*exceeded, *failed]))
    if not is_part and not options.check:
        report.PAGE.write_text(report.page(results_by_cell, folder))
    return 1 if exceeded or failed else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m commands.tpu_programs", description=__doc__)
    parser.add_argument("--match", default="", metavar="REGEX", help='only the cells whose names match, e.g. "^GPT block"')
    parser.add_argument("--check", action="store_true", help=f"compare with {BUDGETS.name} and fail if a figure has grown; no page")
    parser.add_argument("--accept", action="store_true", help=f"write these figures to {BUDGETS.name}")
    parser.add_argument("--fresh", action="store_true", help="drop the results of an earlier run of this code")
    parser.add_argument("--libtpu", type=Path, help="the folder into which libtpu was installed")
    parser.add_argument("--results", type=Path, help="the file of results; by default one for each state of the sources")
    return parser


if __name__ == "__main__":
    sys.exit(main())
