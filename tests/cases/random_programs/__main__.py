"""`python -m cases.random_programs`: compares random programs with eager mode, or looks for planted faults."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from . import runner
from .program import reproducer

RESULTS = Path(".random_programs")


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    torch.set_num_threads(1)
    if options.only is not None:
        return _show(options.only, options.rounded)
    if options.faults is not None:
        if options.rounded:
            from . import rounded_fault_search

            return rounded_fault_search.main(options.faults)
        from . import fault_search

        return fault_search.main(options.faults, runner.seeds(options.seed, options.most))
    path = options.results or RESULTS / f"{'rounded-' if options.rounded else ''}seed-{options.seed}.jsonl"
    known = runner.load(path)
    seeds = runner.seeds(options.seed, options.count)
    remaining = [seed for seed in seeds if seed not in known]
    print(f"{len(seeds)} programs, {len(seeds) - len(remaining)} of them known from {path}", flush=True)
    started = time.monotonic()
    done = 0

    def add(record: runner.Record) -> None:
        nonlocal done
        done += 1
        known[record["seed"]] = record
        if record["outcome"] in runner.BAD:
            print(f"\nseed {record['seed']} {record['outcome']}: {record['kind']}\n{record['detail']}\n{record.get('reproducer', '')}")
        if done % 100 == 0:
            print(f"{done} of {len(remaining)} programs in {time.monotonic() - started:.0f} seconds", flush=True)

    runner.run_all(remaining, options.shards, path, add, options.rounded)
    records = [known[seed] for seed in seeds]
    print(runner.summary(records))
    return int(any(record["outcome"] in runner.BAD for record in records))


def _show(seed: int, rounded: bool) -> int:
    """Prints one program and its verdict."""
    from .generator import generate

    program, _ = generate(seed, rounded)
    print(reproducer(program))
    record = runner.run_one(seed, rounded=rounded)
    print(record["outcome"], record.get("kind", ""), record.get("detail", ""), sep="\n")
    if "reproducer" in record:
        print("The smallest program found that fails in the same way:\n", record["reproducer"], sep="\n")
    return int(record["outcome"] in runner.BAD)


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m cases.random_programs", description=__doc__)
    result.add_argument("--count", type=int, default=1000, help="number of programs")
    result.add_argument("--seed", type=int, default=0, help="selects the programs")
    result.add_argument("--shards", type=int, default=1, help="number of processes")
    result.add_argument(
        "--results", type=Path, help=f"file of results; its programs are not run again (default: {RESULTS}/seed-SEED.jsonl)"
    )
    result.add_argument("--only", type=int, metavar="SEED", help="print and judge the program with this seed")
    result.add_argument("--faults", nargs="*", metavar="NAME", help="plant all or the named faults, and count programs until each is found")
    result.add_argument("--rounded", action="store_true", help="use rounded sizes (the option sizes), and faults in the padding rules")
    result.add_argument("--most", type=int, default=2000, help="with --faults: maximum number of programs for each fault")
    return result


if __name__ == "__main__":
    sys.exit(main())
