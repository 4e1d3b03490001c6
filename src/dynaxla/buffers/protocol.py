"""What a kind of memory offers, so that functions of arrays can be called with tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import torch
from torch.fx import Node


class Binding(Protocol):
    """A compiled program's way to tensors and back, at each call. Thread-safe."""

    def take(self, args: list[Any]) -> list[torch.Tensor]:
        """The tensors that a call needs, of all the graph's inputs: those that the program reads, then those that only outputs alias.
        Empties args."""

    def arrays(self, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        """What the program is called with: aliases of the tensors' memory, or copies. Valid while the tensors live."""

    def export(self, results: Sequence[jax.Array]) -> list[torch.Tensor]:
        """The program's results as tensors, one each, which own their memory."""

    def outputs(self, results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The graph's outputs. results: as exported; tensors: as taken."""

    def code(self, result: torch.Tensor) -> int | None:
        """The number that a program's checks give, or an earlier call's if looking at this one's would mean waiting; None for none."""


class Buffers(Protocol):
    """The memory of one graph with concrete sizes.

    Attributes: nodes (whose values the program gives); numbers (nodes that are returned as numbers); free (the indices among `nodes` of
    results whose dimensions may lie in any order); facts (hashable: what a binding depends on besides numbers).
    """

    @property
    def nodes(self) -> Sequence[Node]: ...

    @property
    def numbers(self) -> Sequence[Node]: ...

    @property
    def free(self) -> Sequence[int]: ...

    @property
    def facts(self) -> Any: ...

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """What the program takes: packed arrays, after its key's seed, if any."""

    def unpack(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
        """In a program: the function's inputs, and its key if it draws random numbers."""

    def pack(self, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        """In a program: what it returns. outputs: of the function, in logical shapes; those that are `free` in any order."""

    def ordered(self, orders: Mapping[int, tuple[int, ...]]) -> Buffers:
        """The same with the free results in these orders: dimension i in memory is dimension orders[index][i] of the node's value."""

    def bind(self, numbers: Sequence[Any]) -> Binding:
        """numbers: the values of `self.numbers`."""
