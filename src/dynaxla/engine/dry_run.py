"""Stops a call at its first program, and returns that program with its inputs instead of running it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .protocol import Runner

# The identifiers of threads in which programs raise DryRun instead of running.
threads: set[int] = set()


class DryRun(BaseException):
    """Raised by a program in place of running. A BaseException, so that handlers in the surrounding code do not catch it.

    Attributes:
        program: The runner that was called; it may consist of several programs.
        inputs: The inputs of the call.
    """

    def __init__(self, program: Runner, args: Sequence[Any]) -> None:
        self.program, self.inputs = program, list(args)


def first_program(call: Callable[[], Any]) -> DryRun | None:
    """Returns the first program that the call would run in this thread, with its inputs; None if it runs none."""
    threads.add(threading.get_ident())
    try:
        call()
    except DryRun as dry_run:
        return dry_run
    finally:
        threads.discard(threading.get_ident())
    return None


def stop_if_dry_run(program: Runner, args: Sequence[Any]) -> None:
    """Raises DryRun if the current thread is one of `threads`. Programs call it at the start of each call while there are any."""
    if threading.get_ident() in threads:
        raise DryRun(program, args)
