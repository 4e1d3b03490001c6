"""Events of compilation and execution, emitted to listeners such as `dynaxla.explain`. Without listeners, no events are created.

A *step* is a training step that `dynaxla.compile_step` compiles as a whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import torch

from .. import forks


class GraphCaptured(NamedTuple):
    """The backend has received a graph.

    Attributes:
        number: The graph's number in this process.
        module: The graph: TorchDynamo's, or that of a step.
        options: The options with which the graph is compiled.
        is_step: True for the graph of a step.
        has_competitors: True if other engines may run the graph (see engine_decisions.py).
    """

    number: int
    module: Any
    options: Any
    is_step: bool
    has_competitors: bool = False


class GraphFunctionalized(NamedTuple):
    """AOTAutograd has turned a captured graph into a graph of ATen ops.

    Attributes:
        number: The number of the captured graph.
        graph: The `AtenGraph`.
        ops: The names of the graph's ops as AOTAutograd has returned them, before later passes change `graph`.
    """

    number: int
    graph: Any
    ops: Sequence[str]

    @staticmethod
    def of(number: int, graph: Any) -> GraphFunctionalized:
        """Returns the event for an `AtenGraph` as it is now."""
        ops = [str(node.target) for node in graph.module.graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
        return GraphFunctionalized(number, graph, ops)


class GraphRewritten(NamedTuple):
    """A pass (see `passes.pipeline`) has rewritten a graph.

    Attributes:
        name: The pass's name.
        level: The kind of graph: "dynamo", "joint", "aten" or "jaxpr".
        before: The number of nodes (of equations, in a jaxpr) before the pass.
        after: This number for each graph that the pass returned.
    """

    name: str
    level: str
    before: int
    after: tuple[int, ...]

    @property
    def sizes(self) -> str:
        """The attribute `after` as text, such as "12 + 3"."""
        return " + ".join(map(str, self.after))


class CompileStarted(NamedTuple):
    """dynaxla is about to build the executable of a graph for concrete sizes.

    Attributes:
        name: The graph's name.
        interpreter: The graph's interpreter.
        symbols: The values of its size symbols.
    """

    name: str
    interpreter: Any
    symbols: Any


class CompileEnded(NamedTuple):
    """The build that the last `CompileStarted` event of this thread announced has ended.

    Attributes:
        name: The graph's name.
        executable: The executable; None if the build has failed, or another way to build the executable follows.
    """

    name: str
    executable: Any


class ImplementationChosen(NamedTuple):
    """An implementation has been chosen for an op.

    Attributes:
        op: The op.
        arguments: The op's shapes and arguments, as readable text.
        implementation: The name of the chosen implementation.
        others: The names of the other implementations that support these shapes and arguments.
        is_measurable: True if the option `tune` measures these implementations.
    """

    op: str
    arguments: str
    implementation: str
    others: Sequence[str]
    is_measurable: bool


class PhaseEnded(NamedTuple):
    """A phase has ended.

    Attributes:
        phase: See `metrics.seconds`.
        seconds: The duration, without that of nested phases.
    """

    phase: str
    seconds: float


class OpFellBack(NamedTuple):
    """torch's kernel computes an op as a fallback.

    Attributes:
        op: The op.
        reason: The reason for the fallback.
        where: The line of user code.
    """

    op: str
    reason: str
    where: str


class InputCopied(NamedTuple):
    """An argument of the program that runs next had to be copied.

    Attributes:
        position: The argument's index among the program's arguments, without the seed.
        reason: The reason for the copy.
        bytes: The size of the copy.
    """

    position: int
    reason: str
    bytes: int


class ProgramRan(NamedTuple):
    """A program has run, or torch's kernels in its place.

    Attributes:
        executable: The executable, or the object that runs torch's kernels.
        seconds: The duration of the call.
        is_first: True for the executable's first run.
        lines: For torch's kernels, the seconds by number of the user's line (see `line_number`).
    """

    executable: Any
    seconds: float
    is_first: bool
    lines: Mapping[int, float] | None = None


class StepFellBack(NamedTuple):
    """A step does not run as one program, or XLA does not partition a graph under the option distributed="spmd".

    Attributes:
        subject: The name of the step or graph.
        mode: The way in which it runs instead, such as "in eager mode".
        reason: The reason.
    """

    subject: str
    mode: str
    reason: str


# The number that stands for code without a user frame.
NO_LINE = -1

_listeners: list[Callable[[Any], None]] = []
# The numbers of user frames. A frame has the format `File "model.py", line 41, in forward`. Traced programs refer to a frame by its number.
_lines: dict[str, int] = {}
_lock = forks.lock()


@contextlib.contextmanager
def listening(listener: Callable[[Any], None]) -> Iterator[None]:
    """Calls a listener with every event inside the context. Events come from all threads, each in its own thread."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def has_listeners() -> bool:
    """True if there are listeners. Programs are then traced with the user's lines, and stored programs, which lack them, are not used."""
    return bool(_listeners)


def emit(event: Any) -> None:
    """Emits an event to all listeners."""
    for listener in list(_listeners):
        listener(event)


def line_scope(frame: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a JAX name scope that marks the operations traced inside it with the number of a user frame.

    Args:
        frame: The frame in the format of fx's stack traces; "" for none.
    """
    return jax.named_scope(f"line[{line_number(frame)}]") if frame else contextlib.nullcontext()


def line_number(frame: str) -> int:
    """Returns the number of a user frame; NO_LINE for none.

    Args:
        frame: The frame in the format of fx's stack traces, or the path of a module; "" for none.
    """
    if not frame:
        return NO_LINE
    with _lock:
        return _lines.setdefault(frame, len(_lines))


def lines() -> list[str]:
    """Returns the frames in the order of their numbers."""
    with _lock:
        return list(_lines)
