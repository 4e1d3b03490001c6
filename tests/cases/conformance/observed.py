"""The ATen ops that XLA executed, and those that torch's kernels ran inside programs because there is no lowering."""

from __future__ import annotations

from dynaxla.observe import coverage

Counts = dict[str, dict[str, int]]


def counts() -> Counts:
    """Returns, for each op, how often it was lowered and how often it fell back, since the process began."""
    return coverage.snapshot()


def since(before: Counts) -> tuple[list[str], list[str]]:
    """Returns the ops that were lowered, and the ops that fell back, since `before`."""
    now = counts()

    def increased(outcome: str) -> list[str]:
        return sorted(op for op, uses in now.items() if uses.get(outcome, 0) > before.get(op, {}).get(outcome, 0))

    return increased("lowered"), increased("fallback")
