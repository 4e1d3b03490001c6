"""The interfaces of an engine and of its runners. An engine turns a graph into a runner, which runs the graph's calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ..capture.graph import AtenGraph
from .executable import Executable


class Runner(Protocol):
    """A graph that can be called with the list of its inputs. Thread-safe.

    The call empties the list (AOTAutograd's boxed calling convention), so that inputs can be freed during the call.

    Attributes:
        name: The graph's name.
    """

    name: str

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        """Returns the graph's outputs.

        Raises: ExecutionError and other errors of dynaxla; exceptions of a torch kernel. If it raises, no input has been written to.
        """

    def executables(self) -> list[Executable]:
        """Returns the compiled programs that the runner keeps, least recently used first."""


class Engine(Protocol):
    """Turns graphs into runners. Thread-safe."""

    def runner(self, graph: AtenGraph) -> Runner:
        """Returns a runner for the graph.

        Raises: UnsupportedOp, UnsupportedTensor, DeviceMismatch, CaptureError.
        """
