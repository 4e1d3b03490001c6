"""`python -m commands.gpu_programs`: compiles the cells, and writes the page or compares with the budgets. Continues an interrupted run."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

from commands.compiled_programs import budgets, results

from . import report
from .errors import GpuProgramsError
from .guard import FOLDER
from .models import BUDGETS, LIMITS, cells
from .runner import compile_all, plugin_folder


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    wanted = [cell for cell in cells() if re.search(options.match, str(cell))]
    if len(wanted) < len(list(cells())) and not (options.check or options.accept):
        raise SystemExit(f"{report.PAGE} has all models: with --match give --check or --accept")
    path = options.results or FOLDER / f"results-{results.code(Path(__file__).parent)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.fresh:
        path.unlink(missing_ok=True)
    started = time.monotonic()
    try:
        results_by_cell = compile_all(wanted, path, options.plugin or plugin_folder())
    except GpuProgramsError as error:
        raise SystemExit(str(error)) from None
    print(f"{len(results_by_cell)} cells in {time.monotonic() - started:.0f} seconds ({path})")
    if options.accept:
        budgets.save(results_by_cell, BUDGETS)
    exceeded = list(LIMITS.exceeded(results_by_cell, budgets.load(BUDGETS))) if options.check or options.accept else []
    failed = [f"{name}: {result['error']}" for name, result in results_by_cell.items() if "error" in result]
    print("\n".join([*exceeded, *failed]))
    if (options.accept or not failed) and not options.check and len(wanted) == len(list(cells())):
        report.PAGE.write_text(report.page(results_by_cell))
    return 1 if exceeded or failed else 0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m commands.gpu_programs", description=__doc__)
    parser.add_argument("--match", default="", metavar="REGEX", help='only cells whose name matches, e.g. "resnet18 bfloat16"')
    parser.add_argument("--check", action="store_true", help=f"compare with {BUDGETS.name} and fail if a figure has grown; writes no page")
    parser.add_argument("--accept", action="store_true", help=f"write these figures to {BUDGETS.name}, and the page even if a cell failed")
    parser.add_argument("--fresh", action="store_true", help="ignore the results of an earlier run of this code")
    parser.add_argument("--plugin", type=Path, help="the folder with JAX's CUDA plugin")
    parser.add_argument("--results", type=Path, help="the file of results; by default one for each state of the sources")
    return parser


if __name__ == "__main__":
    sys.exit(main())
