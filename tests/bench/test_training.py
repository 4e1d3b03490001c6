"""A call of a training is a whole step, and shows the loss and all gradients."""

from __future__ import annotations

import pytest
import torch

from benchmarks import engines
from dynaxla.bench.measure import BenchSettings, measure
from dynaxla.bench.runner import ModelSetup
from dynaxla.bench.training import TrainingStep
from support.fakes.tiny_benchmark import FAST, TINY, invoke, wrapped


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "none"])
def test_training(optimizer: str) -> None:
    """A call is a whole step; a gradient that is not eager's is noticed."""
    chosen = [engines.ENGINES["eager"], engines.ENGINES["dynaxla"], engines.ENGINES["dynaxla_separate"], engines.ENGINES["dynaxla_step"]]
    wrong = wrapped("wrong", lambda out: out + 0.01 * out.detach().sign())
    rows = measure(TINY, [*chosen, wrong], BenchSettings(ModelSetup(batch=4, training=optimizer), rounds=3)).rows
    assert [row.good for row in rows] == [True, True, True, True, False], rows
    assert all(row.agreement is not None and row.agreement.own_error is not None for row in rows), "nothing was compared with float64"
    assert not any(row.failure for row in rows)
    assert all(row.speedup for row in rows[:4])


def test_each_call_is_a_step_of_its_own() -> None:
    """Without dropout, and gradients of earlier calls."""
    training = TrainingStep(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)).eval(), "adamw")
    results = [[loss, *(grad.clone() for grad in grads)] for loss, grads in (training(torch.ones(8, 3)) for _ in range(2))]
    assert all(map(torch.equal, *results))
    assert training.model.training
    assert {int(state["step"]) for state in training.optimizer.state.values()} == {2}


def test_without_an_optimizer_no_parameter_changes() -> None:
    training = TrainingStep(torch.nn.Linear(3, 3), "none")
    before = [parameter.clone() for parameter in training.parameters()]
    results = [[loss, *(grad.clone() for grad in grads)] for loss, grads in (training(torch.ones(8, 3)) for _ in range(2))]
    assert all(map(torch.equal, *results)), "gradients of an earlier call are in it"
    assert all(map(torch.equal, training.parameters(), before))


def test_steps_are_for_training() -> None:
    (row,) = [row for row in measure(TINY, [engines.ENGINES["dynaxla_step"]], FAST).rows]
    assert row.failure == "BenchmarkError: the engine dynaxla_step needs --training"
    assert invoke("--training", "--optimizer", "lion").exit_code == 2
