"""Results of a run: the summary."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Result = dict[str, Any]


def load(path: Path) -> dict[str, Result]:
    """By case. A line that a killed run left unfinished is dropped."""
    known: dict[str, Result] = {}
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                result = json.loads(line)
            except json.JSONDecodeError:
                continue
            known[result["case"]] = result
    return known


def failure_lines(result: Result) -> Iterator[str]:
    for label, count in result["failed"].items():
        example = result["examples"][label]
        message = " ".join(example["message"].split())
        yield f"{result['case']}: {label} ({count} of {calls(result)}): {message[:300]}\n    {example['sample']}"


def calls(result: Result) -> int:
    return result["passed"] + sum(result["failed"].values()) + sum(result["skipped"].values())


class Summary:
    def __init__(self, results: list[Result]) -> None:
        self.results = results
        self.failed: Counter[str] = Counter()
        self.skipped: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.entries: defaultdict[str, dict[str, bool]] = defaultdict(dict)  # by dtype: entry -> whether it passes in full
        for result in results:
            self.failed.update(result["failed"])
            self.skipped.update(result["skipped"])
            self.notes.update(result["notes"])
            entry, dtype, _ = result["case"].rsplit("/", 2)
            passing = self.entries[dtype]
            passing[entry] = passing.get(entry, True) and not result["failed"]

    @property
    def good(self) -> bool:
        return not self.failed

    def text(self) -> str:
        lines = ["", "entries that pass in full:"]
        for dtype, passing in [*self.entries.items()]:
            lines.append(f"  {dtype:10} {sum(passing.values()):5} of {len(passing):5}  {_percent(sum(passing.values()), len(passing))}")
        total = [good for passing in self.entries.values() for good in passing.values()]
        lines.append(f"  {'all':10} {sum(total):5} of {len(total):5}  {_percent(sum(total), len(total))}")
        passed = sum(result["passed"] for result in self.results)
        failed, skipped = self.failed.total(), self.skipped.total()
        lines.append(f"calls: {sum(map(calls, self.results))}, passed {passed}, failed {failed}, skipped {skipped}")
        for title, counter in (("failed", self.failed), ("skipped", self.skipped), ("passed, but", self.notes)):
            lines += [f"{title}:"] if counter else []
            lines += [f"  {count:6} {label}" for label, count in counter.most_common()]
        executed = {op for result in self.results for op in result["executed"]}
        lines.append(f"ops that XLA executed: {len(executed)}")
        fallback = Counter(op for result in self.results for op in result["fallback"])
        lines.append(f"ops that torch's kernels computed: {len(fallback)}")
        lines += [f"  {count:6} cases: {op}" for op, count in fallback.most_common()]
        return "\n".join(lines)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"
