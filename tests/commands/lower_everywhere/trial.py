"""One case on one platform."""

from __future__ import annotations

import gc

from .capture import graphs
from .cases import PLATFORMS, Case
from .expected import CALLS, reason
from .lower import calls, stablehlo


def faults(case: Case) -> list[str]:
    """What is wrong, and not expected, on any platform. A case that is expected to fail and does not is wrong too."""
    found = [_fault(case, platform) for platform in PLATFORMS]
    if case.kind == "model":
        gc.collect()
    return [text for text in found if text]


def _fault(case: Case, platform: str) -> str:
    problem, known = why_not(case, platform), reason(case)
    if known and not problem:
        return f"{case} can be lowered for {platform}: take it off the list of expected.py, which says: {known}"
    return "" if known else problem


def why_not(case: Case, platform: str) -> str:
    """Why a case cannot be lowered for a platform, or which of its calls do not exist there; "" if all is well."""
    try:
        called = set().union(*(calls(stablehlo(graph, platform)) for graph in graphs(case, platform)))
    except Exception as error:
        return f"{case} for {platform}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    unknown = sorted(called - CALLS[platform])
    return f"{case} for {platform} calls {', '.join(unknown)}" if unknown else ""
