"""Programs that are called, and do not run: who asks gets the first one, with its inputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .protocol import Runner

# The threads in which no program runs.
threads: set[int] = set()


class HeldBack(BaseException):
    """Passes through what stands around a program. Attributes: program (what was called: a program, or several); inputs (of the call)."""

    def __init__(self, program: Runner, args: Sequence[Any]) -> None:
        self.program, self.inputs = program, list(args)


def first_program(call: Callable[[], Any]) -> HeldBack | None:
    """The first program that a call would run in this thread; None if it runs none."""
    threads.add(threading.get_ident())
    try:
        call()
    except HeldBack as found:
        return found
    finally:
        threads.discard(threading.get_ident())
    return None


def hold_back(program: Runner, args: Sequence[Any]) -> None:
    """Called by a program while there are such threads. Raises: HeldBack in one of them."""
    if threading.get_ident() in threads:
        raise HeldBack(program, args)
