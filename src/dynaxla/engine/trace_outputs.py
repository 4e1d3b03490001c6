"""The outputs of a traced program as a pytree: the program's arrays, and metadata that the trace has collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class TraceMetadata:
    """The information that a trace collects besides the program. `lowering.function.Results` describes the attributes.

    Attributes:
        checks: The exception class and message of each check.
        numbers: The values of the graph's outputs that are numbers.
        kernels: The torch kernels that the program calls.
        draws: The number of PRNG keys that the program takes from its seed.
    """

    checks: tuple[tuple[type[Exception], str], ...] = ()
    numbers: tuple[Any, ...] = ()
    kernels: tuple[Any, ...] = ()
    draws: int = 0


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True)
class TracedOutputs:
    """The return value of a traced function: a pytree whose leaves are the program's arrays, with the metadata as static data."""

    arrays: Sequence[jax.Array]
    metadata: TraceMetadata

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, jax.Array]], Any]:
        # A plain tuple, because JAX's caches keep the treedefs of traced functions alive.
        metadata = self.metadata.checks, self.metadata.numbers, self.metadata.kernels, self.metadata.draws
        return [(jax.tree_util.SequenceKey(index), array) for index, array in enumerate(self.arrays)], metadata

    @classmethod
    def tree_unflatten(cls, metadata: Any, arrays: Sequence[jax.Array]) -> TracedOutputs:
        return cls(arrays, TraceMetadata(*metadata))
