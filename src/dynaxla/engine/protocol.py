"""What an engine is: it makes runners of graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..capture.aten_graph import AtenGraph
from .executable import Executable


class Runner(Protocol):
    """A graph, callable with the list of its inputs (AOTAutograd's boxed convention: the list is emptied). Thread-safe.

    Attributes: name (the graph's).
    """

    name: str

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """The graph's outputs. Raises: ExecutionError and others of dynaxla's; what a kernel of torch's raises. Nothing is written then."""

    def executables(self) -> list[Executable]:
        """The compiled programs that it keeps, the one not used for the longest time first."""


class Engine(Protocol):
    """Thread-safe."""

    def runner(self, graph: AtenGraph) -> Runner:
        """Raises: UnsupportedOp, UnsupportedTensor, DeviceMismatch, CaptureError."""
