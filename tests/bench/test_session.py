"""A run over several models."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_bench import FAST, TINY, tiny_inputs

from dynaxla.bench import engines, suites
from dynaxla.bench.session import run


def test_an_interrupted_run_reports_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    found = run([TINY, suites.Case("late", interrupt, tiny_inputs)], [engines.ENGINES["eager"]], FAST, "tiny")
    assert [model.model for model in found.models] == ["tiny"]
    assert any("1 of 2 models" in note for note in found.notes)
