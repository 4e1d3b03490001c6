"""The tables of docs/benchmarks: `python -m benchmarks cpu`, `gpu`, `device` or `overhead`, in the root of the source tree.

The basic models and engines, and the timing in turns, are those of `dynaxla bench` (src/dynaxla/bench).
"""

from __future__ import annotations

from pathlib import Path

# The root of the source tree: the working directory in which `python -m benchmarks.MODULE` finds this package.
ROOT = Path(__file__).parents[1]
