"""The interfaces that each kind of memory implements, to convert a call's tensors to a program's arrays, and result arrays to tensors.

The kinds are torch's own memory (native.py) and the arrays of the device "jax" (device/storage_buffers.py), on one device or on a mesh.
"""

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
        donates_inputs: True if the program may overwrite some of its input arrays. Each call of `arrays` must then be followed by a call of
            `export` or `abandon`.
    """

    donates_inputs: bool = False

    def take(self, args: list[Any]) -> list[torch.Tensor]:
        """Returns the tensors that a call needs: the inputs that the program reads, then the inputs that only outputs alias.

        Empties `args`, the list of the graph's inputs.

        Raises:
            LayoutMismatch: The inputs have another layout in their storages than the program expects (device "jax" only). `args` is then
                unchanged.
        """

    def arrays(self, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        """Returns the program's input arrays: aliases of the tensors' memory, or copies.

        An alias does not keep its memory alive, so the tensor must live until the program has read the alias.
        """

    def export(self, results: Sequence[jax.Array], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the program's results as tensors that keep their memory alive.

        The new values of donated inputs are not among them: these are stored in the inputs.

        Args:
            results: The arrays that the program returned.
            tensors: The tensors that `take` returned.
        """

    def abandon(self, out_of_memory: bool, tensors: Sequence[torch.Tensor]) -> bool:
        """Cleans up after a failed call. When the method returns, XLA no longer reads torch's memory for this call.

        Args:
            out_of_memory: True if the call failed because XLA ran out of memory.
            tensors: The tensors that `take` returned.

        Returns:
            True if torch has released its cached memory, so that the call may succeed if it is repeated.
        """

    def outputs(self, results: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> list[Any]:
        """Returns the graph's outputs.

        Args:
            results: The tensors that `export` returned.
            tensors: The tensors that `take` returned.
        """

    def report(self, code: torch.Tensor, checks: Checks, name: str) -> None:
        """Raises the exception of a program's first failed check; nothing if all checks held.

        If calls do not wait for the outcome of checks on this device, a later call raises the exception (see `late_checks`).

        Args:
            code: The program's check code, as exported (see `late_checks.failure`).
            checks: The exception class and message of each of the program's checks.
            name: The program's name.
        """


@dataclass(frozen=True)
class SegmentBuffers:
    """The buffers of a graph that is compiled as several programs (segments), and the layouts of the arguments.

    Attributes:
        buffers: The buffers. The results have the strides of the graph's outputs.
        arguments: By position among the graph's inputs, the layouts of the arguments without the seed, in the order of `avals()`.
    """

    buffers: Buffers
    arguments: Mapping[int, Layout]


class Buffers(Protocol):
    """The memory of the inputs and outputs of one graph with concrete sizes.

    Only some kinds of memory have the capabilities of the attributes and methods with a default.

    Attributes:
        nodes: The nodes whose values the program returns.
        numbers: The nodes that the graph returns as numbers.
        free_results: The indices in `nodes` of results whose memory order the program chooses. On a mesh, the program chooses the shapes of
            these results instead (it may merge dimensions), and their elements are in row-major order.
        open_inputs: The arrays whose memory order XLA chooses when it compiles the program: a dict from an array's index in `avals()` to
            the position of the input among the graph's inputs.
        orders: The memory orders of the free results, as given to `with_result_orders`.
        donated: The indices in `avals()` of arrays that the program may overwrite. The program's first results are the new values of these
            arrays.
        replicated: The replicated sharding of the mesh on which the program runs; None on one device.
        shardings: On a mesh, the shardings of the program's first results. XLA chooses the sharding of a result whose entry is None, and of
            further results.
    """

    nodes: Sequence[Node]
    numbers: Sequence[Node]
    free_results: Sequence[int] = ()
    open_inputs: Mapping[int, int] = {}
    orders: Mapping[int, tuple[int, ...]] = {}
    donated: Sequence[int] = ()
    replicated: NamedSharding | None = None
    shardings: Sequence[NamedSharding | None] = ()

    @property
    def facts(self) -> Any:
        """A hashable value. If two `Buffers` of one graph have equal facts, their bindings differ at most in the graph's numbers."""

    def avals(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the types of the program's arguments: the seed of the random key, if the program has one, and then the packed arrays."""

    def unpack(self, arrays: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
        """Under jit: converts the program's arguments to the function's inputs.

        Returns: the inputs in their logical shapes, and the random key if the function draws random numbers, else None.
        """

    def protect_inputs(
        self, outputs: Sequence[jax.Array], inputs: Sequence[jax.Array], code: jax.Array, all_held: int
    ) -> Sequence[jax.Array]:
        """Under jit: keeps the old values of inputs if a check has failed.

        Some outputs will be copied to inputs before the host has read the check code. If a check has failed, the returned sequence has the
        input's old value in place of each of these outputs.

        Args:
            outputs: The function's outputs.
            inputs: The function's inputs.
            code: The check code, int32[].
            all_held: The value of `code` if no check has failed.
        """

    def pack(self, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        """Under jit: converts the function's outputs to the program's results.

        Args:
            outputs: The function's outputs in their logical shapes. The dimensions of outputs in `free_results` may be in any order.
        """

    def results(self, values: Sequence[Any], no_alias_of: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Converts values that torch's kernels have computed to the tensors that `Binding.export` would return for them.

        No two results share memory.

        Args:
            values: The values of `nodes`, in their order.
            no_alias_of: Tensors whose memory no result may share. A value that shares it is copied.

        Raises:
            RuntimeError: A value has another shape or dtype than the graph's.
            UnsupportedTensor: torch's kernels cannot read this memory.
        """
        raise UnsupportedTensor(
            "torch's kernels cannot compute on the device jax while XLA compiles a graph for it",
            hint="leave out the option compile='background'",
        )

    def with_result_orders(self, orders: Mapping[int, tuple[int, ...]]) -> Buffers:
        """Returns the same buffers, with memory orders for the free results.

        Args:
            orders: By index in `nodes`; dimension i in memory is dimension orders[index][i] of the node's value. A missing entry means
                row-major order.
        """
        return self

    def with_input_orders(self, orders: Mapping[int, tuple[int, ...]]) -> Buffers:
        """Returns the same buffers for a program in which XLA has chosen the memory orders of the open inputs.

        Args:
            orders: By index in `avals()`; dimension i in memory is dimension orders[index][i] of the array.
        """
        return self

    def for_segments(self) -> SegmentBuffers | None:
        """Returns these buffers for a graph that is compiled as several programs.

        None if this is not supported: on a GPU, on the device "jax", or if a result is not simply the packed value of one node.
        """
        return None

    def bind(self, numbers: Sequence[Any]) -> Binding:
        """Returns the binding of a compiled program.

        Args:
            numbers: The values of the nodes in `self.numbers`.
        """
