"""`python -m cases.stress`: threads that compile, train and call at the same time, each result compared with eager mode."""

from __future__ import annotations

import argparse
import faulthandler
import sys

import torch

from . import runner


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    torch.set_num_threads(1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(options.seconds + 700, exit=True)  # if the run hangs
    report = runner.run(options.seconds, options.threads, options.seed, options.backend)
    faulthandler.cancel_dump_traceback_later()
    print(f"{sum(report.counts.values())} jobs: " + ", ".join(f"{count} {name}" for name, count in report.counts.most_common()))
    for sample in report.samples:
        print(f"after {sample.seconds:.0f} s: {sample.megabytes:.0f} MB, {sum(sample.objects.values())} objects of dynaxla and JAX")
    for failure in report.failures:
        print(failure)
    for growth in report.grown:
        print(f"grown: {growth}")
    return int(bool(report.failures or report.grown))


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m cases.stress", description=__doc__)
    result.add_argument("--seconds", type=float, default=600, help="duration, after the first rounds")
    result.add_argument("--threads", type=int, default=8)
    result.add_argument("--seed", type=int, default=0, help="selects values and the order of jobs")
    result.add_argument("--backend", default="dynaxla", help="another backend, e.g. aot_eager, shows defects of torch itself")
    return result


if __name__ == "__main__":
    sys.exit(main())
