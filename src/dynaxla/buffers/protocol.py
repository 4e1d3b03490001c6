"""What a kind of memory offers, so that functions of arrays can be called with tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import torch
from jax.sharding import NamedSharding
from torch.fx import Node

from ..runtime.late_checks import Checks
from ..runtime.layout import Layout


class Binding(Protocol):
    """A compiled program's way to tensors and back, at each call. Thread-safe.

    Attributes: lends (whether what it takes is the program's until it has run, so that either `export` or `abandon` must follow `arrays`).
    """

    @property
    def lends(self) -> bool: ...

    def take(self, args: list[Any]) -> list[torch.Tensor]:
        """The tensors that a call needs, of all the graph's inputs: those that the program reads, then those that only outputs alias.
        Empties args. Raises: Unlike (see device_kinds.py)."""

    def arrays(self, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        """What the program is called with: aliases of the tensors' memory, or copies. Valid while the tensors live."""

    def export(self, results: Sequence[jax.Array], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The program's results as tensors, one each, which own their memory; without those that are inputs' new values already.

        tensors: as taken.
        """

    def abandon(self, for_memory: bool, tensors: Sequence[torch.Tensor]) -> bool:
        """A call has failed: when this returns, nothing of it reads torch's memory any more.

        for_memory: because XLA had too little. tensors: as taken. Returns: whether there may be more now, since torch has given back what
        it kept unused.
        """

    def outputs(self, results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """The graph's outputs. results: as exported; tensors: as taken."""

    def report(self, code: torch.Tensor, checks: Checks, name: str) -> None:
        """code: what a program's checks give, as exported (see `late_checks.failure`). name: the program's.

        Raises: what the first check that failed asks for, here or (if to know it would mean to wait) in a later call.
        """


@dataclass(frozen=True)
class Plain:
    """Buffers whose arrays are packed, each by itself, as layouts say.

    Attributes: buffers (whose results have the strides of the graph); arguments (the layouts of the arrays behind the seed, by their
    positions among the graph's inputs, in the order of `avals()`).
    """

    buffers: Buffers
    arguments: Mapping[int, Layout]


class Buffers(Protocol):
    """The memory of one graph with concrete sizes.

    Attributes: nodes (whose values the program gives); numbers (nodes that are returned as numbers); free (the indices among `nodes` of
    results whose dimensions may lie in any order; on a mesh, of results that may have any shape, their elements in row-major order); loose
    (the arrays among `avals()` whose dimensions may, by index, with the position of each among the graph's inputs); orders (as given to
    `ordered`); donated (the arrays among `avals()`, by index, that a program may write to: the first of its results are what becomes of
    them); facts (hashable: what a binding depends on besides numbers); where (the sharding of what is whole on each device of a mesh, if
    the program runs on one); shardings (of the first of its results then; XLA chooses where there is None).
    """

    @property
    def nodes(self) -> Sequence[Node]: ...

    @property
    def numbers(self) -> Sequence[Node]: ...

    @property
    def free(self) -> Sequence[int]: ...

    @property
    def loose(self) -> Mapping[int, int]: ...

    @property
    def orders(self) -> Mapping[int, tuple[int, ...]]: ...

    @property
    def donated(self) -> Sequence[int]: ...

    @property
    def facts(self) -> Any: ...

    @property
    def where(self) -> NamedSharding | None: ...

    @property
    def shardings(self) -> Sequence[NamedSharding | None]: ...

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """What the program takes: packed arrays, after its key's seed, if any."""

    def unpack(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
        """In a program: the function's inputs, and its key if it draws random numbers."""

    def guard(self, outputs: Sequence[jax.Array], inputs: Sequence[jax.Array], code: jax.Array, right: int) -> Sequence[jax.Array]:
        """In a program: the outputs, with the inputs' old values in place of those that will be written to inputs before anybody has looked
        at the checks, unless these all hold. outputs, inputs: the function's; code: what the checks give, `right` if all hold."""

    def pack(self, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        """In a program: what it returns. outputs: of the function, in logical shapes; those that are `free` in any order."""

    def results(self, values: Sequence[Any], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What a program would return, as exported, if torch's kernels have computed the nodes' values: each alone in memory of its own.

        values: in the order of `nodes`. others: tensors in whose memory no result may lie.
        Raises: RuntimeError for a value of another shape or dtype than the graph says.
        """

    def ordered(self, orders: Mapping[int, tuple[int, ...]]) -> Buffers:
        """The same with the free results in these orders: dimension i in memory is dimension orders[index][i] of the node's value."""

    def laid_out(self, orders: Mapping[int, tuple[int, ...]]) -> Buffers:
        """The same for a program that was compiled for loose arrays in these orders, by their index."""

    def plain(self) -> Plain | None:
        """The same where a program is made of several; None if one of the results is not a node's value alone in its memory."""

    def bind(self, numbers: Sequence[Any]) -> Binding:
        """numbers: the values of `self.numbers`."""
