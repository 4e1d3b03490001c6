"""Has XLA write an intermediate result to memory, where every reader then finds it.

XLA:CPU puts an elementwise function into each loop that reads its result, so that a residual network's sum is computed anew for every
later block, from all that was ever added to it. An optimization barrier is gone before XLA decides that. A call that XLA may not inline
stays, and costs nothing when it runs: its result is its argument's memory.
"""

from __future__ import annotations

import jax
from jax import Array
from jax.experimental.xla_metadata import set_xla_metadata

# The name of the function in a traced program.
NAME = "dynaxla_in_memory"


def in_memory(x: Array) -> Array:
    """The same array, which the program writes to memory once."""
    with set_xla_metadata(inlineable="false"):
        return _call(x)


def _same(x: Array) -> Array:
    return x


_same.__name__ = NAME
_call = jax.jit(_same)
