"""Tests of training/replayed_steps.py: changes between calls are noticed, and a step that is refused changes nothing."""

from __future__ import annotations

import collections
import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dynaxla
from support.models.training_steps import OPTIMIZERS, Net, Step, assert_same, batches, plain, two


def test_changes_between_calls_are_noticed() -> None:
    one, first, other, second = two(OPTIMIZERS["AdamW"])
    eager, compiled = plain(one, first), dynaxla.compile_step(plain(other, second))

    def check(size: int = 5) -> None:
        x, y = batches(1, size)[0]
        torch.testing.assert_close(compiled(x, y), eager(x, y).detach(), rtol=1e-3, atol=1e-4)
        assert_same(one, other, second, first, 1e-3)

    def change_both(change: Callable[[Net, torch.optim.Optimizer], Any]) -> None:
        change(one, first)
        change(other, second)
        check()

    check()
    check(7)
    change_both(lambda model, _: model.eval())
    change_both(lambda model, _: model.train())
    change_both(lambda model, _: setattr(model, "scale", 0.5))
    change_both(lambda model, _: model.frozen.requires_grad_(True))
    change_both(lambda model, _: model.first.requires_grad_(False))
    change_both(lambda _, optimizer: optimizer.param_groups[0].update(weight_decay=0.3))
    change_both(lambda _, optimizer: optimizer.param_groups[0].update(betas=(0.5, 0.6)))
    change_both(lambda model, _: model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()}))
    change_both(lambda model, _: setattr(model.second.weight, "data", torch.ones(8, 8)))
    change_both(lambda _, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())))
    change_both(lambda model, _: setattr(model, "norm", nn.BatchNorm1d(8)))
    change_both(lambda model, _: model.norm.register_forward_hook(lambda module, args, out: out * 2))

    def add_group(model: Net, optimizer: torch.optim.Optimizer) -> None:
        model.first.requires_grad_(True)
        optimizer.add_param_group({"params": list(model.norm.parameters()), "lr": 0.2})

    change_both(add_group)


factor = 1.0


def test_changed_global() -> None:
    global factor
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def step(x: torch.Tensor) -> None:
        (weight * x * factor).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = dynaxla.compile_step(step, fullgraph=True)
    compiled(torch.ones(3))
    torch.testing.assert_close(weight.detach(), torch.zeros(3))
    try:
        factor = 2.0
        compiled(torch.ones(3))
        torch.testing.assert_close(weight.detach(), torch.full((3,), -2.0))
    finally:
        factor = 1.0


step_weight = nn.Parameter(torch.ones(3))
step_optimizer = torch.optim.SGD([step_weight], lr=1.0)
data = iter([1, 2, 3])  # a global with the name of the attribute in `step_weight.data`


@dynaxla.compile_step
def step() -> torch.Tensor:
    step_weight.data.sum()
    step_weight.sum().backward()
    step_optimizer.step()
    step_optimizer.zero_grad()
    return step_weight.sum()


def test_attributes_with_names_of_globals() -> None:
    """The attributes `step_optimizer.step` and `step_weight.data` are not the globals `step` and `data`."""
    assert [step().item() for _ in range(4)] == [0, -3, -6, -9]


def test_changed_array() -> None:
    weight, factors = nn.Parameter(torch.ones(3)), np.ones(3, np.float32)
    optimizer = torch.optim.SGD([weight], lr=1.0)

    def step() -> None:
        (weight * torch.from_numpy(factors)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    compiled = dynaxla.compile_step(step, fullgraph=True)
    compiled()
    factors *= 2
    compiled()
    torch.testing.assert_close(weight.detach(), torch.full((3,), -2.0))


class Settings:
    """A class whose instances have no dict."""

    __slots__ = ("factor",)
    shift = 0.0

    def __init__(self) -> None:
        self.factor = 1.0

    @property
    def doubled(self) -> float:
        return self.factor * 2 * factor


def test_changed_slot_and_class_attribute() -> None:
    settings, weight = Settings(), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)

    @dynaxla.compile_step(fullgraph=True, options={"exact_rng": True})
    def step() -> torch.Tensor:
        (weight * (settings.doubled + settings.shift)).backward()
        optimizer.step()
        optimizer.zero_grad()
        return weight.detach().clone()

    assert step().item() == -2
    settings.factor = 2.0
    assert step().item() == -6
    Settings.shift = 1.0
    try:
        assert step().item() == -11
    finally:
        Settings.shift = 0.0


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict(), [parameter.grad for parameter in model.parameters()]))


@functools.cache
def hidden() -> torch.Tensor:
    return torch.ones(())


def chance() -> float:
    return random.random()


def refused_step(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[Any]) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        out = model(x)
        loss = F.mse_loss(out, y)
        if kind == "not scalar":
            (out - y).backward()
        loss.backward()
        optimizer.step()
        if kind == "item" and loss.item() > 1e9:
            optimizer.step()
        if kind == "if" and loss > 1e9:
            optimizer.step()
        if kind == "random":
            loss = loss * chance()
        if kind == "list":
            losses.append(loss.detach())
        if kind == "nonzero":
            return out[out > 0]
        optimizer.zero_grad()
        return loss

    return step


def test_iterators_are_refused() -> None:
    batch = iter([torch.ones(3)])

    def step() -> torch.Tensor:
        return next(batch)

    with pytest.raises(dynaxla.errors.CaptureError, match="batch, a list_iterator"):
        dynaxla.compile_step(step, fullgraph=True)()
    assert next(batch).sum() == 3


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("item", dynaxla.errors.CaptureError, "item"),
        ("if", dynaxla.errors.CaptureError, "__bool__"),
        ("list", dynaxla.errors.CaptureError, "in Python at every call"),
        ("nonzero", dynaxla.errors.CaptureError, "values"),
        ("random", dynaxla.errors.CaptureError, "random.Random.random at"),
        ("not scalar", RuntimeError, "scalar outputs"),
    ],
)
def test_refused_step_changes_nothing(kind: str, error: type[Exception], text: str) -> None:
    _, _, model, optimizer = two(OPTIMIZERS["AdamW"])
    losses: list[Any] = []
    compiled = dynaxla.compile_step(refused_step(kind, model, optimizer, losses), fullgraph=True)
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=text) as raised:
        compiled(*batches(1)[0])
    torch.testing.assert_close(snapshot(model, optimizer), before, rtol=0, atol=0)
    assert not losses
    if kind in ("item", "if", "nonzero"):
        assert "test_replayed_steps.py" in str(raised.value)


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict])
@pytest.mark.parametrize("is_new", [False, True])
def test_another_order_of_keys_is_refused(kind: type[dict[str, torch.Tensor]], is_new: bool) -> None:
    scales = kind(a=torch.tensor(2.0), b=torch.tensor(3.0))

    def step(x: torch.Tensor) -> torch.Tensor:
        key = next(iter(scales))
        scale = scales.pop(key)
        scales[key] = scale * 1 if is_new else scale
        return x * scale

    with pytest.raises(dynaxla.errors.CaptureError, match="order of the keys of"):
        dynaxla.compile_step(step, fullgraph=True)(torch.ones(1))
    compiled = dynaxla.compile_step(step)
    assert [compiled(torch.ones(1)).item() for _ in range(6)] == [2, 3] * 3


def test_entries_removed_from_arguments() -> None:
    def step(batch: dict[str, torch.Tensor], items: list[torch.Tensor]) -> torch.Tensor:
        return batch["x"] * batch.pop("y") + items.pop(0)

    compiled = dynaxla.compile_step(step, fullgraph=True)
    for number in range(3):
        batch, items = {"x": torch.ones(1), "y": torch.tensor([float(number)])}, [torch.ones(1), torch.zeros(1)]
        assert compiled(batch, items).item() == number + 1
        assert list(batch) == ["x"]
        assert [item.item() for item in items] == [0]


def test_message_names_op_with_varying_number() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        new = [object() for _ in range(3)]
        return x * hash(new[0])

    text = r"aten.mul.Tensor gets \d+ in one run, \d+ in the next\n *from: .*test_replayed_steps.py:\d+, in step"
    with pytest.raises(dynaxla.errors.CaptureError, match=text):
        dynaxla.compile_step(step, fullgraph=True)(torch.ones(3))


def test_function_with_cache_is_refused() -> None:
    def step() -> torch.Tensor:
        return hidden() + 1

    with pytest.raises(dynaxla.errors.CaptureError, match="hidden, a _lru_cache_wrapper"):
        dynaxla.compile_step(step, fullgraph=True)()


def test_failed_program_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, model, optimizer = two(OPTIMIZERS["AdamW"])

    def step(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        loss = (model(x) * torch.ones(4)[index].sum()).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    compiled = dynaxla.compile_step(step)
    x = batches(1)[0][0]
    for index in range(4):
        compiled(x, torch.tensor([index]))
    after = snapshot(model, optimizer)
    with pytest.raises(IndexError):
        compiled(x, torch.tensor([9]))
    torch.testing.assert_close(snapshot(model, optimizer), after, rtol=0, atol=0)
