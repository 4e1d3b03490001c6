"""A run over several models."""

from __future__ import annotations

from typing import Any

import pytest

from dynaxla.bench import engines, suites
from dynaxla.bench.session import ProgressBar, run
from support.fakes.tiny_benchmark import FAST, TINY, tiny_inputs


def test_an_interrupted_run_reports_what_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    found = run([TINY, suites.BenchCase("late", interrupt, tiny_inputs)], [engines.ENGINES["eager"]], FAST, "tiny")
    assert [model.model for model in found.models] == ["tiny"]
    assert any("1 of 2 models" in note for note in found.notes)


def test_each_model_counts_the_same_in_the_bar() -> None:
    bar = ProgressBar(3)
    (task,) = bar._progress.tasks
    seen = []
    for model, steps in (("a", 4), ("b", 2), ("c", 1)):
        bar.begin(model, steps)
        seen.append(task.completed)
        bar.step("a half", steps / 2)
        seen.append(task.completed)
    assert seen == [0, 0.5, 1, 1.5, 2, 2.5]
    assert task.description == "c: a half"
