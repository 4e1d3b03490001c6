"""What a traced program gives: arrays, and what is known of it once it is traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Facts:
    """What a trace has told besides the program: see `Results`."""

    checks: tuple[tuple[type[Exception], str], ...] = ()
    numbers: tuple[Any, ...] = ()
    kernels: tuple[Any, ...] = ()
    draws: int = 0


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Returned:
    """What a traced program gives: arrays, in the program by their places, and facts, in its tree."""

    arrays: Sequence[jax.Array]
    facts: Facts

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, jax.Array]], Any]:
        # Plain tuples: JAX's caches, which are bounded, keep the trees of what has been traced.
        facts = self.facts.checks, self.facts.numbers, self.facts.kernels, self.facts.draws
        return [(jax.tree_util.SequenceKey(index), array) for index, array in enumerate(self.arrays)], facts

    @classmethod
    def tree_unflatten(cls, facts: Any, arrays: Sequence[jax.Array]) -> Returned:
        return cls(arrays, Facts(*facts))
