"""The outputs of a traced program: its arrays, and metadata that is known only after the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class TraceMetadata:
    """The results of a trace besides the program. `lowering.function.Results` describes the attributes."""

    checks: tuple[tuple[type[Exception], str], ...] = ()
    numbers: tuple[Any, ...] = ()
    kernels: tuple[Any, ...] = ()
    draws: int = 0


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class TracedOutputs:
    """A pytree: its leaves are the program's arrays, and its static data is the metadata."""

    arrays: Sequence[jax.Array]
    metadata: TraceMetadata

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, jax.Array]], Any]:
        # Plain tuples, because JAX's caches (which are bounded) keep the treedefs of traced functions alive.
        metadata = self.metadata.checks, self.metadata.numbers, self.metadata.kernels, self.metadata.draws
        return [(jax.tree_util.SequenceKey(index), array) for index, array in enumerate(self.arrays)], metadata

    @classmethod
    def tree_unflatten(cls, metadata: Any, arrays: Sequence[jax.Array]) -> TracedOutputs:
        return cls(arrays, TraceMetadata(*metadata))
