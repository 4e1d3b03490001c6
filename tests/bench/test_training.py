"""A call of a training is a whole step, and shows the loss and all gradients."""

from __future__ import annotations

import pytest
from tiny_bench import FAST, TINY, invoke, wrapped

from dynaxla.bench import engines
from dynaxla.bench.measure import Settings, measure
from dynaxla.bench.runner import Placement


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_training(optimizer: str) -> None:
    """A call is a whole step; a gradient that is not eager's is noticed."""
    chosen = [engines.ENGINES["eager"], engines.ENGINES["dynaxla"], engines.ENGINES["dynaxla_separate"], engines.ENGINES["dynaxla_step"]]
    wrong = wrapped("wrong", lambda out: out + 0.01 * out.detach().sign())
    rows = measure(TINY, [*chosen, wrong], Settings(Placement(batch=4, training=optimizer), rounds=3)).rows
    assert [row.good for row in rows] == [True, True, True, True, False], rows
    assert all(row.agreement is not None and row.agreement.own_error is not None for row in rows), "nothing was compared with float64"
    assert not any(row.failure for row in rows)
    assert all(row.speedup for row in rows[:4])


def test_steps_are_for_training() -> None:
    (row,) = [row for row in measure(TINY, [engines.ENGINES["dynaxla_step"]], FAST).rows]
    assert row.failure == "BenchmarkError: the engine dynaxla_step is one for --training"
    assert invoke("--training", "--optimizer", "lion").exit_code == 2
