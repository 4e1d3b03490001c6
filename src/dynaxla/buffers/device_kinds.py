"""Which implementation of the buffers' protocol is for which kind of torch device: torch's own memory is `NativeBuffers`'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..capture.aten_graph import Phase
from ..lowering import Interpreter, SymbolValues
from .native import Place
from .plan import Storages
from .protocol import Binding, Buffers


class Unlike(Exception):
    """A binding's program is for inputs that lie in another way in their storages. Raised by `take`, before args are emptied."""


@dataclass(frozen=True)
class Request:
    """A graph for whose tensors buffers are wanted.

    Attributes: interpreter; symbols (its sizes); args (a call's inputs); phase; place; storages; remade (see `AtenGraph`); donate (whether
    inputs that the graph writes to may be given to the program, so that it writes in place); planned (whether the program will not
    run, so that inputs may be planned for a virtual mesh).
    """

    interpreter: Interpreter
    symbols: SymbolValues
    args: Sequence[Any]
    phase: Phase
    place: Place
    storages: Storages
    remade: frozenset[int]
    donate: bool
    planned: bool = False


class Kind(Protocol):
    """Tensors of one kind of device."""

    def buffers(self, request: Request) -> Buffers: ...

    def are_traced(self, args: Sequence[Any]) -> bool:
        """Whether arrays of a call are tracers, since JAX traces what calls the graph: then JAX traces that, and no program is called."""

    def plans(self, args: Sequence[Any]) -> Any:
        """Hashable: how a call's inputs lie on a mesh, or would lie on a virtual one."""

    def blank(self, binding: Binding, args: list[Any], lie: Sequence[tuple[tuple[int, ...], Any]]) -> list[Any]:
        """The graph's outputs without values, of a program that does not run. lie: how its results lie, by shape and sharding. Empties
        args."""

    def outlived(self, error: Exception) -> Exception:
        """What to raise for JAX's exception where a tracer's function has ended."""

    def signature(self, args: Sequence[Any]) -> Any:
        """Hashable: how a call's inputs lie in their storages. Inputs of which a binding says that they are `Unlike` have another one."""


_kinds: dict[str, Kind] = {}


def register(device_type: str, kind: Kind) -> None:
    _kinds[device_type] = kind


def kind_of(device_type: str) -> Kind | None:
    """None for torch's own memory."""
    return _kinds.get(device_type)
