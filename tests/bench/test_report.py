"""What is written down of a run."""

from __future__ import annotations

import pytest

from dynaxla.bench import agreement, report
from dynaxla.bench.measure import ModelResult, Row, Settings, Spread


def test_means_are_of_good_rows_only() -> None:
    def row(model: str, engine: str, milliseconds: float, agrees: bool = True) -> Row:
        spread = Spread(milliseconds, milliseconds, milliseconds)
        return Row(model, engine, wall=spread, agreement=agreement.Agreement(agrees))

    found = report.Report("tiny", Settings(), ["eager", "dynaxla"])
    found.models = [
        ModelResult("a", [row("a", "eager", 8), row("a", "dynaxla", 1)]),
        ModelResult("b", [row("b", "eager", 2), row("b", "dynaxla", 1)]),
        ModelResult("c", [row("c", "eager", 100), row("c", "dynaxla", 1, agrees=False)]),
    ]
    mean = found.geometric_mean("dynaxla", "eager")
    assert mean is not None
    assert mean[0] == pytest.approx(4.0)
    assert mean[1] == 2
    assert found.geometric_mean("dynaxla", "inductor") is None
