"""The registry of the implementations of `Buffers` for torch devices whose tensors are not in torch's own memory.

`NativeBuffers` (native.py), for torch's own memory, is not registered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..capture.graph import Phase
from ..lowering import Interpreter, SymbolValues
from .native import GraphDevice
from .output_plan import Storages
from .protocol import Binding, Buffers


class LayoutMismatch(Exception):
    """Raised by `Binding.take` if a call's inputs have another layout in their storages than the program expects.

    The list of arguments is unchanged, so the caller can pass it to another binding.
    """


@dataclass(frozen=True)
class BufferRequest:
    """The arguments for creating the buffers of a graph.

    Attributes:
        interpreter: The graph's interpreter.
        symbols: The values of the graph's symbolic sizes.
        args: The inputs of a call for which the program is compiled.
        phase: The pass that the graph computes: "inference", "forward" or "backward".
        device: The device, for torch and for JAX.
        storages: The storages of the graph's values in eager mode.
        rederived_outputs: See `AtenGraph`.
        donate: True if the arrays of inputs that the graph writes to may be donated, so that the program writes to them in place.
        planned: True if the program is only compiled, not run. Its inputs may then be placed on a virtual mesh.
        reports_late: True if calls do not wait for the outcome of the program's checks (runtime/late_checks.py).
    """

    interpreter: Interpreter
    symbols: SymbolValues
    args: Sequence[Any]
    phase: Phase
    device: GraphDevice
    storages: Storages
    rederived_outputs: frozenset[int]
    donate: bool
    planned: bool = False
    reports_late: bool = False


class DeviceKind(Protocol):
    """The implementation for the tensors of one torch device type."""

    def buffers(self, request: BufferRequest) -> Buffers:
        """Returns the buffers of a graph."""

    def are_tracers(self, args: Sequence[Any]) -> bool:
        """True if the arrays of a call's tensors are JAX tracers, because JAX traces the caller of the graph.

        The graph then becomes a part of that trace, and no program is called.
        """

    def planned_shardings(self, args: Sequence[Any]) -> Any:
        """Returns a hashable description of the shardings of a call's inputs on a mesh or a virtual mesh (see `planned`)."""

    def outputs_without_values(
        self, binding: Binding, args: list[Any], result_shardings: Sequence[tuple[tuple[int, ...], Any]]
    ) -> list[Any]:
        """Returns the outputs of a call whose program is compiled but does not run: tensors without values. Empties `args`.

        Args:
            binding: The program's binding.
            args: The graph's inputs.
            result_shardings: The shape and sharding of each of the program's results.
        """

    def escaped_tracer_error(self, error: Exception) -> Exception:
        """Returns the exception to raise in place of JAX's UnexpectedTracerError, for a tracer that is used after its trace has ended."""

    def layout_signature(self, args: Sequence[Any]) -> Any:
        """Returns a hashable description of the layout of a call's inputs in their storages.

        Inputs for which a binding raises `LayoutMismatch` have another signature than the inputs for which its program was compiled.
        """


_kinds: dict[str, DeviceKind] = {}


def register(device_type: str, kind: DeviceKind) -> None:
    """Registers the implementation for a torch device type, such as "jax"."""
    _kinds[device_type] = kind


def kind_of(device_type: str) -> DeviceKind | None:
    """Returns the implementation for a device type; None for torch's own memory."""
    return _kinds.get(device_type)
