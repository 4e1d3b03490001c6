"""The interface that a kind of memory implements so that programs can be called with tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import torch
from jax.sharding import NamedSharding
from torch.fx import Node

from ..errors import UnsupportedTensor
from ..runtime.late_checks import Checks
from ..runtime.layout import Layout


class Binding(Protocol):
    """Converts between tensors and arrays at each call of a compiled program. Thread-safe.

    Attributes:
        donates_inputs: True if the program owns its input arrays until it has run; either `export` or `abandon` must then follow `arrays`.
    """

    donates_inputs: bool = False

    def take(self, args: list[Any]) -> list[torch.Tensor]:
        """Returns the tensors that a call needs, out of all the graph's inputs: those that the program reads, then those that only outputs
        alias.

        Empties `args`.

        Raises:
            LayoutMismatch: See device_kinds.py.
        """

    def arrays(self, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        """Returns the program's input arrays: aliases of the tensors' memory, or copies. They are valid while the tensors live."""

    def export(self, results: Sequence[jax.Array], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the program's results as tensors that own their memory, without the results that are already the new values of inputs.

        Args:
            tensors: The tensors that `take` returned.
        """

    def abandon(self, for_memory: bool, tensors: Sequence[torch.Tensor]) -> bool:
        """Cleans up after a failed call. When this returns, no part of the call reads torch's memory any more.

        Args:
            for_memory: The call failed because XLA ran out of memory.
            tensors: The tensors that `take` returned.

        Returns:
            True if XLA may have more memory now, because torch has released the memory that it had cached.
        """

    def outputs(self, results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the graph's outputs.

        Args:
            results: The tensors that `export` returned.
            tensors: The tensors that `take` returned.
        """

    def report(self, code: torch.Tensor, checks: Checks, name: str) -> None:
        """Reports the outcome of a program's checks.

        Args:
            code: The program's check code, as exported (see `late_checks.failure`).
            checks: The program's checks.
            name: The program's name.

        Raises:
            The exception of the first check that failed, now or, where this would mean to wait for the device, in a later call.
        """


@dataclass(frozen=True)
class Plain:
    """Buffers whose arrays are packed one by one, according to their layouts.

    Attributes:
        buffers: The buffers; their results have the strides of the graph.
        arguments: The layouts of the arrays after the seed, by their positions among the graph's inputs, in the order of `avals()`.
    """

    buffers: Buffers
    arguments: Mapping[int, Layout]


class Buffers(Protocol):
    """The memory of one graph with concrete sizes. Members with a default are capabilities that only some memory has.

    Attributes:
        nodes: The nodes whose values the program returns.
        numbers: The nodes that are returned as numbers.
        free: Indices among `nodes` of results whose dimensions may have any memory order; on a mesh, of results that may have any shape,
            with their elements in row-major order.
        loose: Arrays among `avals()` whose dimensions may have any memory order: their index, and the position of each among the graph's
            inputs.
        orders: The orders given to `ordered`.
        donated: Indices among `avals()` of arrays that a program may overwrite. The first results of the program are their new values.
        where: The sharding of a value that is replicated on all devices of a mesh, if the program runs on one.
        shardings: On a mesh, the shardings of the program's first results; XLA chooses where an entry is None.
    """

    nodes: Sequence[Node]
    numbers: Sequence[Node]
    free: Sequence[int] = ()
    open_inputs: Mapping[int, int] = {}
    orders: Mapping[int, tuple[int, ...]] = {}
    donated: Sequence[int] = ()
    where: NamedSharding | None = None
    shardings: Sequence[NamedSharding | None] = ()

    @property
    def facts(self) -> Any:
        """Everything besides numbers on which a binding depends, as a hashable value."""

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the program's parameters: the seed of its key, if any, and then the packed arrays."""

    def unpack(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
        """In a program: returns the function's inputs, and its key if it draws random numbers."""

    def guard(self, outputs: Sequence[jax.Array], inputs: Sequence[jax.Array], code: jax.Array, right: int) -> Sequence[jax.Array]:
        """In a program: protects inputs from being overwritten after a failed check.

        Returns the outputs. If a check failed, the outputs that will be written to inputs before the host reads the checks are replaced by
        the inputs' old values.

        Args:
            outputs, inputs: The function's.
            code: The check code.
            right: The code if all checks hold.
        """

    def pack(self, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        """In a program: returns its results.

        Args:
            outputs: The function's outputs, in logical shapes; those that are `free` in any order.
        """

    def results(self, values: Sequence[Any], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the results that a program would return, as exported, from values that torch's kernels have computed.

        Each result is alone in its own memory.

        Args:
            values: The values of `nodes`, in their order.
            others: Tensors whose memory no result may share.

        Raises:
            RuntimeError: A value has another shape or dtype than the graph's.
            UnsupportedTensor: torch's kernels cannot read this memory.
        """
        raise UnsupportedTensor(
            "torch's kernels cannot run a graph on this device while XLA compiles it", hint="leave out the option compile='background'"
        )

    def ordered(self, orders: Mapping[int, tuple[int, ...]]) -> Buffers:
        """Returns the same buffers with the free results in these orders: dimension i in memory is dimension orders[index][i] of the node's
        value.
        """
        return self

    def laid_out(self, orders: Mapping[int, tuple[int, ...]]) -> Buffers:
        """Returns the same buffers for a program that was compiled for loose arrays in these orders, by their index."""
        return self

    def plain(self) -> Plain | None:
        """Returns the same buffers for a program that is composed of several, or None if a result is not a node's value alone in its
        memory.
        """
        return None

    def bind(self, numbers: Sequence[Any]) -> Binding:
        """Returns the binding for a compiled program. `numbers`: the values of `self.numbers`."""
