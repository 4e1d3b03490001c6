"""The registry of buffer implementations by torch device type. `NativeBuffers` serves torch's own memory and is not registered."""

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
    """A call's inputs have another layout in their storages than the binding's program expects.

    Raised by `take`, before it empties its argument.
    """


@dataclass(frozen=True)
class Request:
    """A graph for whose tensors buffers are requested.

    Attributes:
        interpreter: The graph.
        symbols: The values of its symbolic sizes.
        args: A call's inputs.
        phase: The graph's phase.
        place: The device.
        storages: The graph's storages.
        rederived_outputs: See `AtenGraph`.
        donate: True if inputs that the graph writes to may be donated to the program, so that it writes in place.
        planned: True if the program will not run, so that inputs may be planned for a virtual mesh.
        reports_late: True if calls do not wait for the program's checks.
    """

    interpreter: Interpreter
    symbols: SymbolValues
    args: Sequence[Any]
    phase: Phase
    place: GraphDevice
    storages: Storages
    rederived_outputs: frozenset[int]
    donate: bool
    planned: bool = False
    reports_late: bool = False


class DeviceKind(Protocol):
    """The implementation for the tensors of one kind of device."""

    def buffers(self, request: Request) -> Buffers: ...

    def are_traced(self, args: Sequence[Any]) -> bool:
        """True if the arrays of a call are tracers because JAX traces the caller of the graph. JAX then traces the graph, and no program is
        called.
        """

    def plans(self, args: Sequence[Any]) -> Any:
        """Returns a hashable description of how a call's inputs are sharded on a mesh, or would be on a virtual one."""

    def blank(self, binding: Binding, args: list[Any], lie: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
        """Returns the graph's outputs without values, for a program that does not run. Empties `args`.

        Args:
            lie: The shape and sharding of each of the program's results.
        """

    def outlived(self, error: Exception) -> Exception:
        """Returns the exception to raise in place of JAX's where a tracer's function has ended."""

    def signature(self, args: Sequence[Any]) -> Any:
        """Returns a hashable description of the layout of a call's inputs in their storages.

        Inputs for which a binding raises `LayoutMismatch` have another signature.
        """


_kinds: dict[str, DeviceKind] = {}


def register(device_type: str, kind: DeviceKind) -> None:
    _kinds[device_type] = kind


def kind_of(device_type: str) -> DeviceKind | None:
    """Returns the implementation for a device type; None for torch's own memory."""
    return _kinds.get(device_type)
