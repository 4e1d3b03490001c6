"""Tests of a run's report as JSON and Markdown."""

from __future__ import annotations

import json
import math

import pytest

from dynaxla.autoselect import agreement
from dynaxla.bench import report
from dynaxla.bench.measure import BenchSettings, EngineResult, ModelResult, Spread
from dynaxla.bench.runner import ModelSetup


def test_means_include_only_good_rows() -> None:
    def row(model: str, engine: str, milliseconds: float, agrees: bool = True) -> EngineResult:
        spread = Spread(milliseconds, milliseconds, milliseconds)
        return EngineResult(model, engine, wall=spread, agreement=agreement.NumericalAgreement(agrees))

    result = report.BenchReport("tiny", BenchSettings(), ["eager", "dynaxla"])
    result.models = [
        ModelResult("a", [row("a", "eager", 8), row("a", "dynaxla", 1)]),
        ModelResult("b", [row("b", "eager", 2), row("b", "dynaxla", 1)]),
        ModelResult("c", [row("c", "eager", 100), row("c", "dynaxla", 1, agrees=False)]),
    ]
    mean = result.geometric_mean("dynaxla", "eager")
    assert mean is not None
    assert mean[0] == pytest.approx(4.0)
    assert mean[1] == 2
    assert result.geometric_mean("dynaxla", "inductor") is None


def test_report_includes_failures_and_disagreements() -> None:
    spread, disagreement = Spread(2.0, 1.0, 3.0), agreement.NumericalAgreement(False, math.inf)
    phases = {"capture": 0.5, "compile": 1.0}
    result = report.BenchReport("tiny", BenchSettings(ModelSetup(training="sgd")), ["eager", "dynaxla", "dynaxla_retrace"])
    rows = [
        EngineResult("a", "eager", wall=spread, speedup=1.0, agreement=agreement.NumericalAgreement(True)),
        EngineResult("a", "dynaxla", wall=spread, speedup=4.0, agreement=disagreement, first_call_seconds=2.0, first_phases=phases),
        EngineResult("a", "dynaxla_retrace", failure="a | b"),
    ]
    result.models = [ModelResult("a", rows, capture_failure="no luck")]
    data = json.loads(json.dumps(report.as_json(result), allow_nan=False))
    assert [row["good"] for row in data["models"][0]["rows"]] == [True, False, False]
    assert data["models"][0]["rows"][1]["agreement"]["error"] == "inf"
    assert data["conclusions"] == ["2 of 3 rows failed or disagree with eager."]
    lines = report.as_markdown(result).splitlines()
    assert "# dynaxla bench: tiny, training with sgd on cpu" in lines
    assert "| a | 1.000 | - | - |" in lines
    assert "| a | dynaxla | 0.500 | 0.000 | 0.000 | 1.000 | 0.500 | 2.000 |" in lines, "time outside the phases is the rest"
    assert "| a | - | - | - | - | - | - | failed: no luck |" in lines
    assert any(line.endswith(r"| failed: a \| b | - |") for line in lines)
    assert report._heights(result, "dynaxla") == [0.0, 0.0]
