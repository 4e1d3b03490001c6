"""The outputs of a traced program: arrays, and facts that are known after the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Facts:
    """The results of a trace besides the program; for its attributes see `Results`."""

    checks: tuple[tuple[type[Exception], str], ...] = ()
    numbers: tuple[Any, ...] = ()
    kernels: tuple[Any, ...] = ()
    draws: int = 0


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class Returned:
    """A pytree of the program's arrays, as leaves, and of the facts, as static data of the tree."""

    arrays: Sequence[jax.Array]
    facts: Facts

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, jax.Array]], Any]:
        # Plain tuples, because JAX's caches (which are bounded) keep the treedefs of traced functions alive.
        facts = self.facts.checks, self.facts.numbers, self.facts.kernels, self.facts.draws
        return [(jax.tree_util.SequenceKey(index), array) for index, array in enumerate(self.arrays)], facts

    @classmethod
    def tree_unflatten(cls, facts: Any, arrays: Sequence[jax.Array]) -> Returned:
        return cls(arrays, Facts(*facts))
