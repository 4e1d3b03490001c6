"""The tables of docs/benchmarks: `python -m benchmarks cpu`, `gpu`, `device` or `overhead`, in the root of the source tree.

`dynaxla bench` (src/dynaxla/bench) has what they measure with: models, engines, and the timing in turns.
"""

from __future__ import annotations

from pathlib import Path

# Where `python -m benchmarks.MODULE` finds this package.
ROOT = Path(__file__).parents[1]
