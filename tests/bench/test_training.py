"""Tests of measured training steps, which return the loss and all gradients."""

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
def test_wrong_gradients_are_detected(optimizer: str) -> None:
    good_engines = [
        engines.ENGINES["eager"],
        engines.ENGINES["dynaxla"],
        engines.ENGINES["dynaxla_separate"],
        engines.ENGINES["dynaxla_step"],
    ]
    wrong_engine = wrapped("wrong", lambda out: out + 0.01 * out.detach().sign())
    rows = measure(TINY, [*good_engines, wrong_engine], BenchSettings(ModelSetup(batch=4, training=optimizer), rounds=3)).rows
    assert [row.agrees for row in rows] == [True, True, True, True, False], rows
    assert all(row.agreement is not None and row.agreement.own_error is not None for row in rows), "nothing was compared with float64"
    assert not any(row.failure for row in rows)
    assert all(row.speedup for row in rows[:4])


def test_calls_are_independent_steps() -> None:
    """Dropout is disabled, and gradients of earlier calls are cleared."""
    training = TrainingStep(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)).eval(), "adamw")
    results = [[loss, *(grad.clone() for grad in grads)] for loss, grads in (training(torch.ones(8, 3)) for _ in range(2))]
    assert all(map(torch.equal, *results))
    assert training.model.training
    assert {int(state["step"]) for state in training.optimizer.state.values()} == {2}


def test_without_an_optimizer_no_parameter_changes() -> None:
    training = TrainingStep(torch.nn.Linear(3, 3), "none")
    before = [parameter.clone() for parameter in training.parameters()]
    results = [[loss, *(grad.clone() for grad in grads)] for loss, grads in (training(torch.ones(8, 3)) for _ in range(2))]
    assert all(map(torch.equal, *results)), "gradients of an earlier call were added"
    assert all(map(torch.equal, training.parameters(), before))


def test_step_engine_without_training_is_refused() -> None:
    (row,) = [row for row in measure(TINY, [engines.ENGINES["dynaxla_step"]], FAST).rows]
    assert row.failure == "BenchmarkError: the engine dynaxla_step needs --training"
    assert invoke("--training", "--optimizer", "lion").exit_code == 2
