"""The outcome of a case on a platform, and its comparison with the expected outcome."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from .capture import graphs
from .cases import PLATFORMS, Case
from .expected import ABORTS, CALLS, COMPILING, LOWERING, expectation
from .lower import calls, lowered

_CAN = {LOWERING: "can be lowered", COMPILING: "can be compiled", ABORTS: "ends no process"}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case on a platform.

    Attributes:
        kind: The kind of failure: LOWERING, COMPILING or ABORTS; "" for a success.
        text: The error's class and message.
        calls: The functions that the case's programs call, sorted.
    """

    kind: str = ""
    text: str = ""
    calls: tuple[str, ...] = ()


def outcome(case: Case, platform: str, device: jax.Device | None = None) -> Outcome:
    """Lowers a case, and compiles it if a device is given.

    Args:
        device: The device of a topology of the platform to compile for; None to lower only.
    """
    try:
        programs = [lowered(graph, platform, device) for graph in graphs(case, platform)]
        called = tuple(sorted(set().union(*(calls(program.as_text()) for program in programs))))
    except Exception as error:
        return Outcome(LOWERING, _text(error))
    if device is not None and set(called) <= CALLS[platform]:
        try:
            for program in programs:
                program.compile()
        except Exception as error:
            return Outcome(COMPILING, _text(error), called)
    return Outcome(calls=called)


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def faults(case: Case) -> list[str]:
    """Returns the faults of a case that is lowered for all platforms."""
    texts = [fault(case, platform, outcome(case, platform)) for platform in PLATFORMS]
    return [text for text in texts if text]


def fault(case: Case, platform: str, actual: Outcome, is_compiled: bool = False) -> str:
    """Returns the fault of an unexpected outcome; "" for an expected one. A case that should fail and passes is a fault, too.

    Args:
        is_compiled: True if a case that can be lowered was compiled, too.
    """
    kind, reason = expectation(case, platform)
    if kind != LOWERING and not is_compiled:
        kind = ""
    if kind and kind != actual.kind:
        other = f" {actual.text}" if actual.kind else ""
        return f"{case} {_CAN[kind]} for {platform}: take it off the list of expected.py, which says: {reason}.{other}"
    if actual.kind:
        return "" if kind else f"{case} for {platform} {actual.kind}: {actual.text}"
    unknown = sorted(set(actual.calls) - CALLS[platform])
    return f"{case} for {platform} calls {', '.join(unknown)}" if unknown else ""
