"""Tests of a run with several models."""

from __future__ import annotations

from typing import Any

import pytest

from dynaxla.bench import engines, suites
from dynaxla.bench.session import ProgressBar, run
from support.fakes.tiny_benchmark import FAST, TINY, tiny_inputs


def test_interrupted_run_reports_the_measured_models(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    result = run([TINY, suites.BenchCase("late", interrupt, tiny_inputs)], [engines.ENGINES["eager"]], FAST, "tiny")
    assert [model.model for model in result.models] == ["tiny"]
    assert any("1 of 2 models" in note for note in result.notes)


def test_progress_bar_gives_each_model_equal_weight() -> None:
    bar = ProgressBar(3)
    (task,) = bar._progress.tasks
    completed = []
    for model, steps in (("a", 4), ("b", 2), ("c", 1)):
        bar.begin(model, steps)
        completed.append(task.completed)
        bar.step("a half", steps / 2)
        completed.append(task.completed)
    assert completed == [0, 0.5, 1, 1.5, 2, 2.5]
    assert task.description == "c: a half"
