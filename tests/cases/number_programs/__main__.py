"""`python -m cases.number_programs [--count 1000] [--seed 0]`: random programs, and the number of those that differ from eager mode."""

from __future__ import annotations

import argparse
import logging
import sys

import torch

from cases.number_programs.programs import difference


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("dynaxla").setLevel(logging.ERROR)  # many of these steps stay in eager mode
    failed = 0
    for seed in range(given.seed, given.seed + given.count):
        if report := difference(seed):
            failed += 1
            print(report, flush=True)
    print(f"{given.count} programs, {failed} differ from eager mode")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
