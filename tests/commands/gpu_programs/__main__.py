"""`python -m commands.gpu_programs`: compile the cells, continue an interrupted run of the same code, write the page or compare."""

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
        found = compile_all(wanted, path, options.plugin or plugin_folder())
    except GpuProgramsError as error:
        raise SystemExit(str(error)) from None
    print(f"{len(found)} cells in {time.monotonic() - started:.0f} seconds ({path})")
    if options.accept:
        budgets.save(found, BUDGETS)
    too_much = list(LIMITS.exceeded(found, budgets.load(BUDGETS))) if options.check or options.accept else []
    failed = [f"{name}: {result['error']}" for name, result in found.items() if "error" in result]
    print("\n".join([*too_much, *failed]))
    if (options.accept or not failed) and not options.check and len(wanted) == len(list(cells())):
        report.PAGE.write_text(report.page(found))
    return 1 if too_much or failed else 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m commands.gpu_programs", description=__doc__)
    made.add_argument("--match", default="", metavar="REGEX", help='only cells that this finds, e.g. "resnet18 bfloat16"')
    made.add_argument("--check", action="store_true", help=f"compare with {BUDGETS.name} and fail where a figure has grown; no page")
    made.add_argument("--accept", action="store_true", help=f"write these figures to {BUDGETS.name}, and the page even if a cell failed")
    made.add_argument("--fresh", action="store_true", help="forget what an earlier run of this code has found")
    made.add_argument("--plugin", type=Path, help="the folder with JAX's CUDA plugin")
    made.add_argument("--results", type=Path, help="the file of results; by default one for each state of the sources")
    return made


if __name__ == "__main__":
    sys.exit(main())
