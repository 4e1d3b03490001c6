"""The cases that are known to fail. Each raises an error that says so; none gives a wrong result. One that passes is an error too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .entries import Case


@dataclass(frozen=True)
class Expected:
    """In every case of these dtypes and kinds, at least one call raises `error` (an exception's name), and none fails otherwise."""

    database: str
    name: str
    dtypes: tuple[str, ...]
    kinds: tuple[str, ...]
    error: str
    reason: str

    def cases(self) -> list[Case]:
        return [Case(self.database, self.name, dtype, kind) for dtype in self.dtypes for kind in self.kinds]


EXPECTED: tuple[Expected, ...] = ()


def by_case(known: Iterable[Expected] = EXPECTED) -> dict[str, Expected]:
    """Raises: ValueError for a case that is named twice."""
    found: dict[str, Expected] = {}
    for item in known:
        for case in item.cases():
            if found.setdefault(str(case), item) is not item:
                raise ValueError(f"{case} is expected to fail twice")
    return found
