"""What happens to graphs on their way, told to those who listen (`dynaxla.explain`). Where nobody does, nothing is looked at or kept."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax


class Captured(NamedTuple):
    """A backend begins with a graph. Attributes: number; module (TorchDynamo's graph, or a step's); options; is_step; competes (whether
    other engines may run it)."""

    number: int
    module: Any
    options: Any
    is_step: bool
    competes: bool = False


class Functional(NamedTuple):
    """AOTAutograd has made a graph of ATen ops of it. Attributes: number (of the captured graph); graph (`AtenGraph`); ops (by name, before
    an engine changes the graph)."""

    number: int
    graph: Any
    ops: Sequence[str]


class Building(NamedTuple):
    """A program of the graph called `name` is about to be traced, lowered and compiled, for concrete sizes.

    Attributes: name; interpreter; symbols (the sizes).
    """

    name: str
    interpreter: Any
    symbols: Any


class Built(NamedTuple):
    """That is done, or has failed (executable: None)."""

    name: str
    executable: Any


class Took(NamedTuple):
    """A form has been taken. Attributes: op; problem (for people); form; others (that would have fitted); is_measurable (whether the option
    `tune` measures them)."""

    op: str
    problem: str
    form: str
    others: Sequence[str]
    is_measurable: bool


class Spent(NamedTuple):
    """A phase has ended. Attributes: phase (see `metrics.seconds`); seconds (without what other phases took inside of it)."""

    phase: str
    seconds: float


class FellBack(NamedTuple):
    """torch's kernel computes an op. Attributes: op; reason; where (the user's line)."""

    op: str
    reason: str
    where: str


class Copied(NamedTuple):
    """An argument of the program that runs next had to be copied. Attributes: place (among its tensors); reason; bytes."""

    place: int
    reason: str
    bytes: int


class Ran(NamedTuple):
    """A program has run, or torch's kernels in its place. Attributes: executable; seconds; is_first (since it was made); lines (of torch's
    kernels: seconds by the number of the user's line)."""

    executable: Any
    seconds: float
    is_first: bool
    lines: Mapping[int, float] | None = None


class WentOn(NamedTuple):
    """A step goes another way than as one program. Attributes: step; way ("in eager mode"); reason."""

    step: str
    way: str
    reason: str


# The number of no line.
UNPLACED = -1

_listeners: list[Callable[[Any], None]] = []
# The user's lines that traced programs name, as File "model.py", line 41, in forward; what names them is their number.
_lines: dict[str, int] = {}
_lock = threading.Lock()


@contextlib.contextmanager
def heard(listener: Callable[[Any], None]) -> Iterator[None]:
    """Inside, a listener is told of all that happens, in all threads, in the thread in which it happens."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def is_heard() -> bool:
    """Whether somebody listens. Then programs know the user's lines, and none is taken from the cache directory, whose do not."""
    return bool(_listeners)


def tell(event: Any) -> None:
    """Tell everybody who listens."""
    for listener in list(_listeners):
        listener(event)


def line_scope(frame: str) -> contextlib.AbstractContextManager[Any]:
    """Inside, what is traced has a number for the user's line in the name that XLA knows it by. frame: as fx has it; "" for none."""
    return jax.named_scope(f"line[{line_number(frame)}]") if frame else contextlib.nullcontext()


def line_number(frame: str) -> int:
    """The number of the user's line; -1 for none. frame: as fx has it; "" for none."""
    if not frame:
        return UNPLACED
    with _lock:
        return _lines.setdefault(frame, len(_lines))


def lines() -> list[str]:
    """The frames by their number."""
    with _lock:
        return list(_lines)
