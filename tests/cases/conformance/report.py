"""The results of a run: loading them, their summary, and docs/op_coverage.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import torch

from support import json_lines

from .entries import DATABASES, DTYPES, Case, entries
from .expected import Expected, by_case

Result = dict[str, Any]
_SHORT = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "int64": "i64", "bool": "bool", "complex64": "c64"}


def load(path: Path) -> dict[str, Result]:
    """Returns the last result of each case."""
    return {result["case"]: result for result in json_lines.load(path)}


def failure_lines(result: Result) -> Iterator[str]:
    for label, count in result["failed"].items():
        example = result["examples"][label]
        message = " ".join(example["message"].split())
        yield f"{result['case']}: {label} ({count} of {calls(result)}): {message[:300]}\n    {example['sample']}"


def calls(result: Result) -> int:
    return result["passed"] + sum(result["failed"].values()) + sum(result["skipped"].values())


@dataclass
class Entry:
    """The results of an entry with one dtype, for all kinds of input together."""

    database: str
    name: str
    dtype: str
    passed: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    executed: set[str] = field(default_factory=set)
    fallback: set[str] = field(default_factory=set)

    def add(self, result: Result) -> None:
        self.passed += result["passed"]
        self.failed.update(result["failed"])
        self.skipped.update(result["skipped"])
        self.executed.update(result["executed"])
        self.fallback.update(result["fallback"])

    @property
    def state(self) -> str:
        """Returns "passes", "fails", or "empty" if nothing could be compared."""
        if self.failed:
            return "fails"
        return "passes" if self.passed else "empty"


class Summary:
    """Counts of the results of some cases.

    Attributes:
        good: True if each failure is expected, and each expected failure occurs.
    """

    def __init__(self, results: Sequence[Result], known: Iterable[Expected] | None = None) -> None:
        self.results = results
        expectations = by_case() if known is None else by_case(known)
        self.entries: dict[tuple[str, str, str], Entry] = {}
        self.expected: list[str] = []
        self.unexpected_failures: list[str] = []
        self.unexpected_passes: list[str] = []
        for result in results:
            database, name, dtype, _ = parts(result["case"])
            self.entries.setdefault((database, name, dtype), Entry(database, name, dtype)).add(result)
            expectation = expectations.get(result["case"])
            label = None if expectation is None else f"raises:{expectation.error}"
            if set(result["failed"]) - {label}:
                self.unexpected_failures.append(result["case"])
            elif result["failed"]:
                self.expected.append(result["case"])
            elif expectation is not None and result["complete"]:
                self.unexpected_passes.append(result["case"])

    @property
    def good(self) -> bool:
        return not self.unexpected_failures and not self.unexpected_passes

    def total(self, field_name: str) -> Counter[str]:
        """Returns the sum of the counts in the field "failed", "skipped" or "notes"."""
        return sum((Counter(result[field_name]) for result in self.results), Counter())

    def text(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        yield f"torch {torch.__version__}, jax {jax.__version__}"
        yield "entries (an entry with a dtype, in all its kinds of input): pass in full / compared; nothing to compare; with a fallback"
        for database in DATABASES:
            found = [entry for entry in self.entries.values() if entry.database == database]
            for dtype in [str(dtype).removeprefix("torch.") for dtype in DTYPES]:
                yield from _state_line(f"{database} {dtype}", [entry for entry in found if entry.dtype == dtype])
            yield from _state_line(f"{database} all dtypes", found)
        yield from _state_line("all", list(self.entries.values()))
        passed = sum(result["passed"] for result in self.results)
        failed, skipped, notes = (self.total(what) for what in ("failed", "skipped", "notes"))
        yield f"cases: {len(self.results)}"
        yield f"calls: {sum(map(calls, self.results))}; passed {passed}, failed {failed.total()}, skipped {skipped.total()}"
        wrong = sum(count for label, count in failed.items() if label.startswith("wrong"))
        yield f"wrong results: {wrong} calls"
        for title, counter in (("failed", failed), ("skipped", skipped), ("passed, but", notes)):
            yield from [f"{title}:"] if counter else []
            yield from (f"  {count:7} {label}" for label, count in counter.most_common())
        executed = {op for result in self.results for op in result["executed"]}
        fallback = Counter(op for result in self.results for op in result["fallback"])
        yield f"ops that XLA executed: {len(executed)}; ops that torch's kernels computed for want of a lowering: {len(fallback)}"
        yield from (f"  {count:7} cases with {op}" for op, count in fallback.most_common())
        names = {(entry.database, entry.name) for entry in self.entries.values()}
        through = {(entry.database, entry.name) for entry in self.entries.values() if entry.fallback}
        yield f"entries, whatever their dtype: {len(names)}; with a fallback: {len(through)} ({_percent(len(through), len(names))})"
        yield f"expected failures: {len(self.expected)} cases"
        for title, found in (("unexpected failures", self.unexpected_failures), ("unexpected passes", self.unexpected_passes)):
            yield f"{title}: {len(found)} cases"
            yield from (f"  {case}" for case in found)


def parts(case: str) -> tuple[str, str, str, str]:
    """Returns database, name, dtype and kind of a case."""
    entry, dtype, kind = case.rsplit("/", 2)
    database, name = entry.split("/", 1)
    return database, name, dtype, kind


def _state_line(title: str, found: Sequence[Entry]) -> Iterator[str]:
    if found:
        states = Counter(entry.state for entry in found)
        compared = states["passes"] + states["fails"]
        fallback = sum(bool(entry.fallback) for entry in found)
        share = f"{states['passes']:5} / {compared:5} {_percent(states['passes'], compared):>6}"
        yield f"  {title:24} {share}; {states['empty']:4}; {fallback:4} {_percent(fallback, len(found)):>6}"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def coverage_page(summary: Summary) -> str:
    """Returns docs/op_coverage.md: the summary, then a line for each entry."""
    lines = [
        "# Op coverage",
        "",
        "Written by `make conformance ARGS=--write-docs`. PyTorch's own databases of operators and modules, compiled with",
        "`fullgraph=True` and compared with eager in values, dtype, shape, strides and aliasing; `tests/cases/conformance/` says how.",
        "",
        "```",
        *summary.lines(),
        "```",
    ]
    for database in DATABASES:
        lines += ["", f"## {database}", "", "| entry | through | passes with | otherwise |", "| --- | --- | --- | --- |"]
        for name in entries(database):
            by_dtype = {dtype: entry for (kept, other, dtype), entry in summary.entries.items() if (kept, other) == (database, name)}
            if by_dtype:
                lines.append(_row(name, by_dtype))
    return "\n".join(lines) + "\n"


def _row(name: str, by_dtype: Mapping[str, Entry]) -> str:
    passing = [_SHORT[dtype] for dtype, entry in by_dtype.items() if entry.state == "passes"]
    other: dict[str, list[str]] = {}
    for dtype, entry in by_dtype.items():
        if entry.state != "passes":
            labels = entry.failed or entry.skipped
            other.setdefault(", ".join(sorted(labels)) or "no samples", []).append(_SHORT[dtype])
    other_column = "; ".join(f"{' '.join(dtypes)}: {labels}" for labels, dtypes in other.items())
    cells = [name, _through(next(iter(by_dtype.values())), by_dtype.values()), " ".join(passing), other_column]
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _through(first: Entry, by_dtype: Iterable[Entry]) -> str:
    """Says how the entry's ops were computed."""
    fallback = set().union(*(entry.fallback for entry in by_dtype))
    executed = set().union(*(entry.executed for entry in by_dtype))
    if fallback:
        return f"fallback: {', '.join(sorted(fallback))}"
    if not executed:
        return "no computation"
    info = Case(first.database, first.name, first.dtype, "samples").info
    own_op = getattr(getattr(info, "torch_opinfo", info), "aten_name", "").replace(".", "_")
    return "lowering" if any(op.split(".")[1] == own_op for op in executed) else "decomposition"
