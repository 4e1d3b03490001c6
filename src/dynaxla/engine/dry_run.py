"""Dry runs: a call is stopped at its first program, and the program is returned with its inputs instead of being run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .protocol import Runner

# The identifiers of threads in which programs raise DryRun instead of running.
threads: set[int] = set()


class DryRun(BaseException):
    """Raised by a program that is called in a dry run. A BaseException, so that handlers of Exception in the user's code do not catch it.

    Attributes:
        program: The runner that was called. It may consist of several programs, as a `Schedule` does.
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
    """Raises DryRun if the current thread is one of `threads`. Runners call this at the start of each call, unless `threads` is empty."""
    if threading.get_ident() in threads:
        raise DryRun(program, args)
