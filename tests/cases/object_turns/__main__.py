"""`python -m cases.object_turns [--count 5000] [--seed 0] [--faults]`: compares with eager mode, or looks for planted faults."""

from __future__ import annotations

import argparse
import sys

import torch

from cases.faults.steps import FAULTS
from cases.object_turns.programs import differences


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.faults:
        for name, fault in FAULTS.items():
            with fault():
                found = sum(_fails(seed) for seed in range(options.seed, options.seed + options.count))
            print(f"{name}: found by {found} of {options.count} programs", flush=True)
        return 0
    failed = 0
    for seed in range(options.seed, options.seed + options.count):
        if difference := differences(seed):
            failed += 1
            print(difference, flush=True)
        if (seed + 1) % 100 == 0:
            print(f"{seed + 1 - options.seed} programs, {failed} differ", flush=True)
    print(f"{options.count} programs, {failed} differ from eager mode")
    return int(failed > 0)


def _fails(seed: int) -> bool:
    try:
        return bool(differences(seed))
    except Exception:  # a planted fault may end in an error of any kind
        return True


if __name__ == "__main__":
    sys.exit(main())
