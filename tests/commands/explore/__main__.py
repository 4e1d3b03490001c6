"""`python -m commands.explore`: runs random cases until the time is over, and prints each failure with the command that repeats it."""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import secrets
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from .sources import SOURCES, Source

# A case that takes longer than this is assumed to hang; its process is ended.
SILENCE_SECONDS = 900
SEEDS_PER_PROCESS = 300
SEEDS_OF_A_RUN = 1_000_000


def main(argv: list[str] | None = None, sources: Mapping[str, Source] = SOURCES) -> int:
    options = parser().parse_args(argv)
    if options.only is not None:
        name, _, seed = options.only.partition(":")
        if name not in sources or not seed.isdecimal():
            parser().error(f"--only {options.only}: SOURCE is one of {', '.join(sources)}, and SEED a number")
        problem = sources[name](int(seed))
        print(problem or "nothing is wrong")
        return int(bool(problem))
    run = secrets.randbelow(SEEDS_OF_A_RUN) if options.seed is None else options.seed
    print(f"--seed {run}", flush=True)
    seconds, counts, failures = dict.fromkeys(sources, 0.0), dict.fromkeys(sources, 0), 0
    explorer = Explorer()
    end = time.monotonic() + options.minutes * 60
    while (start := time.monotonic()) < end:
        name = min(seconds, key=lambda name: seconds[name])  # gives each source an equal share of the time
        seed = run * SEEDS_OF_A_RUN + counts[name]
        problem = explorer.judge(sources[name], seed)
        if problem:
            failures += 1
            print(f'\n{problem}\nrepeat: make explore ARGS="--only {name}:{seed}"', flush=True)
        counts[name] += 1
        seconds[name] += time.monotonic() - start
    explorer.close()
    print(", ".join(f"{count} {name}" for name, count in counts.items()) + f": {failures} failed")
    return int(bool(failures))


class Explorer:
    """Runs cases in another process, so that a crash is a failure like others."""

    def __init__(self) -> None:
        self._pool = self._start()

    @staticmethod
    def _start() -> ProcessPoolExecutor:
        context = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=SEEDS_PER_PROCESS)
        pool.submit(_is_ready).result()
        return pool

    def judge(self, source: Source, seed: int) -> str:
        try:
            return self._pool.submit(_judge, source, seed).result()
        except BrokenProcessPool:
            self._pool = self._start()
            return "the process crashed, or was silent for too long"

    def close(self) -> None:
        self._pool.shutdown()


def _is_ready() -> bool:
    """Returns when the process has imported this module, and with it torch."""
    return True


def _judge(source: Source, seed: int) -> str:
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(SILENCE_SECONDS, exit=True)
    try:
        return source(seed)
    finally:
        faulthandler.cancel_dump_traceback_later()
        torch._dynamo.reset()


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m commands.explore", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="time for new cases; a case that has begun is finished")
    parser.add_argument("--seed", type=int, help="repeats the cases of the run that printed this seed; by default a random seed")
    parser.add_argument("--only", metavar="SOURCE:SEED", help="runs one case, as printed for a failure")
    return parser


if __name__ == "__main__":
    sys.exit(main())
