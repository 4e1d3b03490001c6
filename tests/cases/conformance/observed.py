"""Which ATen ops XLA executed, and which torch's kernels ran inside the programs for want of a lowering."""

from __future__ import annotations

from dynaxla.observe import coverage

Counts = dict[str, dict[str, int]]


def counts() -> Counts:
    """By op: how many of its uses were lowered, and how many went to the fallback, since the process began."""
    return coverage.snapshot()


def since(before: Counts) -> tuple[list[str], list[str]]:
    """The ops that were lowered, and those that fell back, since `before`."""
    now = counts()

    def grown(how: str) -> list[str]:
        return sorted(op for op, uses in now.items() if uses.get(how, 0) > before.get(op, {}).get(how, 0))

    return grown("lowered"), grown("fallback")
