"""The interface of a kind of memory (torch's memory, a mesh): it converts the tensors of a call to a program's arrays and back."""

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
        """Returns the tensors that a call needs: the inputs that the program reads, then the inputs that only outputs alias.

        Empties `args`, the list of the graph's inputs.

        Raises:
            LayoutMismatch: See device_kinds.py.
        """

    def arrays(self, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        """Returns the program's input arrays: aliases of the tensors' memory, or copies. An alias is valid while its tensor lives."""

    def export(self, results: Sequence[jax.Array], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the program's results as tensors that own their memory. Results that are in an input's memory already are left out.

        Args:
            tensors: The tensors that `take` returned.
        """

    def abandon(self, for_memory: bool, tensors: Sequence[torch.Tensor]) -> bool:
        """Cleans up after a failed call. When this returns, no part of the call reads torch's memory any more.

        Args:
            for_memory: The call failed because XLA ran out of memory.
            tensors: The tensors that `take` returned.

        Returns:
            True if torch has released its cached memory, so that XLA may have more memory now.
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
            The exception of the first check that failed. If the outcome is not known without waiting for the device, a later call raises.
        """


@dataclass(frozen=True)
class Plain:
    """Buffers in which each array is packed by itself, according to its layout.

    Attributes:
        buffers: The buffers. The results have the strides of the graph's outputs.
        arguments: The layout of each array after the seed, by the array's position among the graph's inputs, in the order of `avals()`.
    """

    buffers: Buffers
    arguments: Mapping[int, Layout]


class Buffers(Protocol):
    """The memory of one graph with concrete sizes. Members with a default are capabilities that only some kinds of memory have.

    Attributes:
        nodes: The nodes whose values the program returns.
        numbers: The nodes that the graph returns as numbers.
        free: Indices among `nodes` of results whose memory order the program chooses; on a mesh, of results whose shape the program
            chooses, with the elements in row-major order.
        open_inputs: The arrays whose memory order the program chooses, as a dict from the array's index among `avals()` to its position
            among the graph's inputs.
        orders: The memory orders that `ordered` was called with.
        donated: Indices among `avals()` of arrays that a program may overwrite. The program's first results are the new values of these
            arrays.
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
        """A hashable value that covers all facts that a binding depends on, except the numbers."""

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the program's parameters: the seed of the random key, if the program has one, and then the packed arrays."""

    def unpack(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
        """In a program: returns the function's inputs, and the random key if the function draws random numbers."""

    def guard(self, outputs: Sequence[jax.Array], inputs: Sequence[jax.Array], code: jax.Array, right: int) -> Sequence[jax.Array]:
        """In a program: protects inputs from being overwritten after a failed check.

        Returns the outputs. If a check failed, each output that is written to an input before the host reads the checks is replaced by the
        old value of this input.

        Args:
            outputs: The function's outputs.
            inputs: The function's inputs.
            code: The check code.
            right: The check code if no check failed.
        """

    def pack(self, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        """In a program: returns the program's results.

        Args:
            outputs: The function's outputs in their logical shapes. `free` outputs may have their dimensions in any order.
        """

    def results(self, values: Sequence[Any], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns the tensors that `Binding.export` would return, from values that torch's kernels have computed.

        No two results share memory.

        Args:
            values: The values of `nodes`, in their order.
            others: Tensors whose memory no result may share.

        Raises:
            RuntimeError: A value has another shape or dtype than the graph's.
            UnsupportedTensor: torch's kernels cannot read this memory.
        """
        raise UnsupportedTensor(
            "torch's kernels cannot compute on the device jax while XLA compiles a graph for it",
            hint="leave out the option compile='background'",
        )

    def ordered(self, orders: Mapping[int, tuple[int, ...]]) -> Buffers:
        """Returns the same buffers with these memory orders of the free results.

        Dimension i in memory is dimension orders[index][i] of the node's value.
        """
        return self

    def laid_out(self, orders: Mapping[int, tuple[int, ...]]) -> Buffers:
        """Returns the same buffers for a program that was compiled with these memory orders of `open_inputs`."""
        return self

    def plain(self) -> Plain | None:
        """Returns the same buffers for a program that is composed of several programs.

        None if a result is not the value of one node in memory of its own.
        """
        return None

    def bind(self, numbers: Sequence[Any]) -> Binding:
        """Returns the binding for a compiled program. `numbers`: the values of `self.numbers`."""
