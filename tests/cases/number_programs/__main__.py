"""`python -m cases.number_programs [--count 1000] [--seed 0]`: runs random programs, and counts differences from eager mode."""

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
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("dynaxla").setLevel(logging.ERROR)  # many of these steps stay in eager mode
    failed = 0
    for seed in range(options.seed, options.seed + options.count):
        if report := difference(seed):
            failed += 1
            print(report, flush=True)
    print(f"{options.count} programs, {failed} differ from eager mode")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
