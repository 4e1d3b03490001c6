"""Tests of the benchmark of single ops."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from benchmarks.single_op_cases import CASES, OpCase, normal, whole
from benchmarks.single_ops_left_out import left_out

from benchmarks import single_op_cases, single_ops

SMALL = {
    "sine": OpCase("sine", "sin", torch.sin, (normal(100),)),
    "rows": OpCase("rows", "index_select", lambda x, index: x.index_select(0, index), (normal(10, 10), whole(10, 10))),
    "wrong": OpCase("wrong", "add", lambda x: x if torch.compiler.is_compiling() else x + 1, (normal(100),), False),
    "failing": OpCase("failing", "mm", torch.mm, (normal(2, 3), normal(2, 3)), False),
}


def test_cases_have_the_documented_number_and_unique_names() -> None:
    assert len(CASES) >= 250
    assert len({case.entry for case in CASES.values()}) >= 250
    assert sum(case.dtype == torch.bfloat16 for case in CASES.values()) >= 15
    assert [name for name, case in CASES.items() if name != case.name] == []
    assert len(CASES) == len(list(single_op_cases._cases())), "two cases have the same name"


@pytest.mark.thorough
def test_ops_without_a_case_have_a_reason() -> None:
    reasons = left_out({case.entry for case in CASES.values()})
    assert reasons.get("no reason") is None
    assert "nonzero" in reasons["the size of the result depends on values"]


@pytest.mark.thorough
def test_rows_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(single_ops, "CASES", SMALL)
    monkeypatch.setattr(single_ops, "left_out", lambda known: {"random numbers": ["rand"]})
    assert not single_ops.write(tmp_path, ["sine", "rows", "wrong", "failing"], 0.001)
    rows = json.loads((tmp_path / "ops.json").read_text())["rows"]
    assert list(rows) == ["sine, forward", "sine, gradient", "rows, forward", "rows, gradient", "wrong, forward", "failing, forward"]
    for name in list(rows)[:4]:
        assert rows[name]["failure"] == ""
        assert min(rows[name][engine] for engine in ("eager", "dynaxla", "empty")) > 0
        assert (rows[name]["aot_eager"] is not None) == (single_ops.ratios(rows[name])[0] > 1.25)
    assert rows["wrong, forward"]["failure"].startswith("disagrees with eager")
    assert "mat1 and mat2" in rows["failing, forward"]["failure"]
    page = (tmp_path / "ops.md").read_text()
    assert "| sine, forward |" in page
    assert "- random numbers: rand" in page
    assert not (tmp_path / "unfinished-ops.json").exists()


def test_ratios() -> None:
    slower = asdict(single_ops.Measured(2.0, 5.0, 1.0, 4.0, 3.0, 1.0, aot_eager=1.5))
    assert single_ops.ratios(slower) == (2.0, 2.5, 0.5)
    assert single_ops._summary({"sine, forward": slower})[-1] == "| forward | 1 | 2.00 | 2.50 | 1 | 1 | 1 | 0 |"
    faster = asdict(single_ops.Measured(2.0, 2.5, 0.5, 2.0, 2.5, 0.5))
    assert single_ops._summary({"sine, forward": slower, "abs, forward": faster})[-1] == "| forward | 2 | 1.41 | 1.77 | 1 | 1 | 1 | 0 |"
    assert single_ops._aot_eager_cell(faster) == ""
