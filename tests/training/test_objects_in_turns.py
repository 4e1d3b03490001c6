"""One step for several models and optimizers: each call creates state in its own objects, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import dynaxla

Optimizer = Callable[[Any, float], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Optimizer] = {
    "sgd with momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
    "adamw": torch.optim.AdamW,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
}
FOLDS, TURNS, LATE = (0, 0, 0, 1, 1, 1, 2, 2, 2), (0, 1, 0, 1, 0, 1), (0, 0, 0, 0, 1, 2, 1, 0)


class Fold:
    """A model, its optimizer, and the averages and metrics that a step stores."""

    def __init__(self, seed: int, optimizer: Optimizer) -> None:
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 1)
        self.optimizer = optimizer(self.model.parameters(), 0.1)
        self.average: dict[nn.Parameter, torch.Tensor] = {}
        self.metrics: dict[str, torch.Tensor] = {}

    def tensors_and_counts(self) -> list[Any]:
        """Returns all tensors that steps have left, and the number of entries of each container."""
        parameters = list(self.model.parameters())
        state = [value for parameter in parameters for value in self.optimizer.state[parameter].values()]
        counts = [len(self.optimizer.state), len(self.average), len(self.metrics)]
        averages = [self.average[parameter] for parameter in parameters if parameter in self.average]
        return [*parameters, *[parameter.grad for parameter in parameters], *state, *averages, *self.metrics.values(), counts]


Step = Callable[..., torch.Tensor]


def losses_and_folds(step: Step, order: Sequence[int], optimizer: Optimizer) -> tuple[list[float], list[Fold]]:
    folds = [Fold(seed, optimizer) for seed in range(max(order) + 1)]
    torch.manual_seed(0)
    losses = []
    for number in order:
        fold = folds[number]
        losses.append(step(fold.model, fold.optimizer, fold.average, fold.metrics, torch.randn(8, 3)).item())
    return losses, folds


def check(step: Step, order: Sequence[int], optimizer: Optimizer) -> None:
    mine, my_folds = losses_and_folds(dynaxla.compile_step(step), order, optimizer)
    expected, folds = losses_and_folds(step, order, optimizer)
    assert mine == pytest.approx(expected, rel=1e-4)
    for my_fold, fold in zip(my_folds, folds, strict=True):
        torch.testing.assert_close(my_fold.tensors_and_counts(), fold.tensors_and_counts(), rtol=1e-3, atol=1e-5, allow_subclasses=False)
    memory = [tensor.data_ptr() for fold in my_folds for tensor in fold.tensors_and_counts() if isinstance(tensor, torch.Tensor)]
    assert len(memory) == len(set(memory)), "two models share a tensor that a step has created"


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("order", [FOLDS, TURNS, LATE], ids=["folds", "turns", "late"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state(name: str, order: Sequence[int]) -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, average: Any, metrics: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    check(step, order, OPTIMIZERS[name])


def test_averages_by_parameter_and_metrics_by_name() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, average: Any, metrics: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter in average:
                    average[parameter].lerp_(parameter, 0.1)
                else:
                    average[parameter] = parameter.clone()
        metrics["loss"] = loss.detach() * 2
        return loss.detach()

    check(step, FOLDS, OPTIMIZERS["sgd with momentum"])


def test_gradients_that_stay() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer, average: Any, metrics: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    check(step, FOLDS, OPTIMIZERS["adamw"])


def test_step_that_stores_a_closure_is_not_replayed() -> None:
    def step(model: nn.Module, predictors: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        predictors["of this call"] = lambda x: model(x)
        return model(x).detach()

    compiled = dynaxla.compile_step(step)
    models, predictors, x = [nn.Linear(3, 1), nn.Linear(3, 1)], dict[str, Any](), torch.randn(8, 3)
    for number in (0, 0, 0, 1, 1):
        torch.testing.assert_close(compiled(models[number], predictors, x), models[number](x).detach())
        torch.testing.assert_close(predictors["of this call"](x), models[number](x))


def test_step_that_stores_a_new_key_is_not_replayed() -> None:
    def step(table: dict[Any, Any], x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        table[y] = y + 1
        return y

    compiled, table = dynaxla.compile_step(step), dict[Any, Any]()
    for turn in range(1, 5):
        y = compiled(table, torch.full((2,), float(turn)))
        assert len(table) == turn
        assert [value.tolist() for value in table.values()] == [[2.0 * number + 1] * 2 for number in range(1, turn + 1)]
        assert y.tolist() == [2.0 * turn] * 2


def test_argument_that_moves_in_a_list() -> None:
    """The argument's path was looked up in the surroundings instead of the arguments: a KeyError."""

    def step(items: list[Any], x: torch.Tensor) -> torch.Tensor:
        items[1], items[0] = items[0], x * 2
        return x + 1

    compiled, items = dynaxla.compile_step(step, fullgraph=True), [torch.zeros(2), None]
    for turn in range(1, 4):
        compiled(items, torch.full((2,), float(turn)))
        assert [item.tolist() for item in items if item is not None] == [[2.0 * turn] * 2, [2.0 * turn - 2] * 2]
