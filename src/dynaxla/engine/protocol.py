"""The interface of an engine, which turns a graph into a runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..capture.graph import AtenGraph
from .executable import Executable


class Runner(Protocol):
    """A graph that can be called with the list of its inputs (AOTAutograd's boxed convention: the call empties the list). Thread-safe.

    Attributes:
        name: The graph's name.
    """

    name: str

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Returns the graph's outputs.

        Raises: ExecutionError and other errors of dynaxla; exceptions of a torch kernel. No input has been written to in that case.
        """

    def executables(self) -> list[Executable]:
        """Returns the compiled programs that the runner keeps, least recently used first."""


class Engine(Protocol):
    """Turns graphs into runners. Thread-safe."""

    def runner(self, graph: AtenGraph) -> Runner:
        """Returns a runner for the graph.

        Raises: UnsupportedOp, UnsupportedTensor, DeviceMismatch, CaptureError.
        """
