"""`python -m cases.random_programs`: compare many random programs with eager mode, or look for planted faults."""

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
    wanted = runner.seeds(options.seed, options.count)
    remaining = [seed for seed in wanted if seed not in known]
    print(f"{len(wanted)} programs, {len(wanted) - len(remaining)} of them known from {path}", flush=True)
    started = time.monotonic()
    done = 0

    def seen(record: runner.Record) -> None:
        nonlocal done
        done += 1
        known[record["seed"]] = record
        if record["outcome"] in runner.BAD:
            print(f"\nseed {record['seed']} {record['outcome']}: {record['kind']}\n{record['detail']}\n{record.get('reproducer', '')}")
        if done % 100 == 0:
            print(f"{done} of {len(remaining)} programs in {time.monotonic() - started:.0f} seconds", flush=True)

    runner.run_all(remaining, options.shards, path, seen, options.rounded)
    records = [known[seed] for seed in wanted]
    print(runner.summary(records))
    return int(any(record["outcome"] in runner.BAD for record in records))


def _show(seed: int, rounded: bool) -> int:
    """Judge one program, and print it."""
    from .generator import generate

    program, _ = generate(seed, rounded)
    print(reproducer(program))
    record = runner.run_one(seed, rounded=rounded)
    print(record["outcome"], record.get("kind", ""), record.get("detail", ""), sep="\n")
    if "reproducer" in record:
        print("The smallest program that fails alike:\n", record["reproducer"], sep="\n")
    return int(record["outcome"] in runner.BAD)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m cases.random_programs", description=__doc__)
    made.add_argument("--count", type=int, default=1000, help="how many programs")
    made.add_argument("--seed", type=int, default=0, help="which ones")
    made.add_argument("--shards", type=int, default=1, help="processes")
    made.add_argument("--results", type=Path, help=f"programs found there are not run again (default: {RESULTS}/seed-SEED.jsonl)")
    made.add_argument("--only", type=int, metavar="SEED", help="print and judge the program of one seed, as the results name it")
    made.add_argument(
        "--faults", nargs="*", metavar="NAME", help="plant faults, all of them or some, and count programs until each is found"
    )
    made.add_argument("--rounded", action="store_true", help="with rounded sizes (the option sizes), and faults in the rules for these")
    made.add_argument("--most", type=int, default=2000, help="with --faults: how many programs are tried for each")
    return made


if __name__ == "__main__":
    sys.exit(main())
