"""compile_step's lazy way among several processes: steps whose Python has effects, or looks at values, against the same in eager mode.

Each case is made twice; the two must do the same to tensors, optimizers, Python's objects and whatever they log, call by call.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from lazy_cases import CASES
from lazy_cases.world import Step, World, world

import dynaxla
from dynaxla.config import Options
from dynaxla.observe import metrics
from dynaxla.runtime import hollow
from dynaxla.training.lazy import Session
from dynaxla.training.step import CompiledStep
from dynaxla.training.traces import Traces
from dynaxla.training.watched import Watched


@pytest.fixture(autouse=True)
def lazily(monkeypatch: pytest.MonkeyPatch) -> None:
    """As among other processes, but without any."""
    monkeypatch.setattr(CompiledStep, "_must_be_seen", lambda _: False)
    monkeypatch.setattr(Watched, "must_be_lazy", lambda *_: True)


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(5, 6, generator=generator), torch.randn(5, 4, generator=generator)) for _ in range(count)]


def value_of(item: Any) -> Any:
    return item.state_dict() if hasattr(item, "state_dict") else item


def compare(mine: Any, theirs: Any, tolerance: float, where: str) -> None:
    if isinstance(theirs, torch.Tensor):
        assert type(mine) is type(theirs), where
        assert mine.stride() == theirs.stride(), where
        torch.testing.assert_close(mine.detach(), theirs.detach(), rtol=tolerance, atol=tolerance, msg=lambda text: f"{where}: {text}")
    elif isinstance(theirs, dict):
        assert list(mine) == list(theirs), where
        for key in theirs:
            compare(mine[key], theirs[key], tolerance, f"{where}[{key!r}]")
    elif isinstance(theirs, (list, tuple)):
        assert len(mine) == len(theirs), where
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            compare(one, other, tolerance, f"{where}[{index}]")
    elif isinstance(theirs, (float, np.floating)):
        assert type(mine) is type(theirs), where
        assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance, nan_ok=True), where
    elif isinstance(theirs, str):
        assert mine[:5] == theirs[:5], where  # numbers within may differ in their last digits
    elif isinstance(theirs, random.Random):
        assert mine.getstate() == theirs.getstate()
    else:
        assert mine == theirs, where


# bfloat16 is computed in another order.
TOLERANCES = {"in_half": 3e-2, "changes_numbers": 1e-2}


def agree(make: Callable[[], tuple[World, Step]], calls: int = 6, tolerance: float = 2e-4, **settings: Any) -> dict[str, int]:
    """Run a case both ways. Returns what metrics count during the compiled steps' last call."""
    one, eager = make()
    other, raw = make()
    compiled = dynaxla.compile_step(raw, **settings)
    counted: dict[str, int] = {}
    states = [torch.get_rng_state(), torch.get_rng_state()]
    for number, (x, y) in enumerate(batches(calls)):
        results = []
        for index, run in enumerate((eager, compiled)):
            torch.set_rng_state(states[index])
            before = metrics.snapshot()
            try:
                results.append(run(x.clone(), y.clone()))
            except KeyError as error:
                results.append(str(error))
            states[index] = torch.get_rng_state()
            counted = {key: value - before.get(key, 0) for key, value in metrics.snapshot().items()}
        theirs, mine = results
        if isinstance(theirs, torch.Tensor):
            assert mine.requires_grad == (theirs.is_leaf and theirs.requires_grad)
        compare(mine, theirs, tolerance, f"call {number}: result")
        compare(other.log, one.log, tolerance, f"call {number}: log")
        compare(other.model.state_dict(), one.model.state_dict(), tolerance, f"call {number}: model")
        compare(other.optimizer.state_dict(), one.optimizer.state_dict(), tolerance, f"call {number}: optimizer")
        for key, item in one.more.items():
            compare(value_of(other.more[key]), value_of(item), tolerance, f"call {number}: {key}")
        for name, parameter in one.model.named_parameters():
            gradient = other.model.get_parameter(name).grad
            assert (gradient is None) == (parameter.grad is None), name
            if gradient is not None:
                compare(gradient, parameter.grad, tolerance, f"call {number}: gradient of {name}")
    return counted


@pytest.mark.sample(usual=4)
@pytest.mark.parametrize("name", CASES)
def test_as_in_eager_mode(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    counted = agree(CASES[name], tolerance=TOLERANCES.get(name, 2e-4))
    assert not counted.get("eager_steps")
    if name == "prints":
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 24
        assert all(one.partition(".")[0] == other.partition(".")[0] for one, other in zip(lines[::4], lines[2::4], strict=True))


@pytest.mark.parametrize("name", ["keeps_graphs", "writes_between", "reads_memory"])
def test_results_that_are_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch cannot exchange the memory of storages."""
    monkeypatch.setattr(hollow, "_SWAPS", False)
    agree(CASES[name], calls=4)


def test_a_program_that_fails() -> None:
    """It has written nothing; what it should have given is there, and is no number. Parts before it stay done."""
    here = world(lambda parameters: torch.optim.AdamW(parameters, lr=0.1))

    @dynaxla.compile_step
    def step(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        loss = here.model(x).square().sum()
        here.log.append(loss.item())
        (loss * torch.ones(4)[index].sum()).backward()
        here.optimizer.step()
        return loss

    x = batches(1)[0][0]
    for _ in range(3):
        here.optimizer.zero_grad()
        step(x, torch.tensor([3]))
    here.optimizer.zero_grad()
    before = copy.deepcopy((dict(here.model.named_parameters()), here.optimizer.state_dict()))
    with pytest.raises(IndexError):
        step(x, torch.tensor([7]))
    compare(dict(here.model.named_parameters()), before[0], 0.0, "parameters")
    compare(here.optimizer.state_dict(), before[1], 0.0, "state")
    assert len(here.log) == 4
    assert all(parameter.grad is None for parameter in here.model.parameters())
    here.optimizer.zero_grad()
    assert step(x, torch.tensor([2])).isfinite()


def test_programs_are_bounded() -> None:
    """Numbers that are not ATen's to take as inputs, another one at each call, and sizes."""
    seen: list[float] = []

    @dynaxla.compile_step(options={"executables": 1})
    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.sum().item())
        return x.roll(len(seen)) * len(seen)

    for size in range(1, 25):
        x = torch.arange(float(size))
        torch.testing.assert_close(step(x), x.roll(size) * size)
    assert len(step._traces._compiled) == 8
    assert metrics.snapshot()["evictions"]


def test_a_place_that_moves_needs_few_programs() -> None:
    losses, counts = torch.zeros(6), [0]
    weight = torch.ones(4, requires_grad=True)

    @dynaxla.compile_step
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (x * weight).sum()
        losses[counts[0] % 6] = loss.detach()
        counts[0] += 1
        return loss * 2

    before = metrics.snapshot().get("compile", 0)
    for number in range(8):
        torch.testing.assert_close(step(torch.full((4,), float(number))).item(), number * 8.0)
    torch.testing.assert_close(losses, torch.tensor([24.0, 28.0, 8.0, 12.0, 16.0, 20.0]))
    assert metrics.snapshot().get("compile", 0) - before <= 4


def test_the_default_dtype_counts() -> None:
    seen: list[float] = []

    @dynaxla.compile_step
    def step(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.sum().item())
        return torch.ones(3) + torch.arange(3) / 2

    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float32, torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            assert step(torch.ones(3)).dtype == dtype
    finally:
        torch.set_default_dtype(before)


def test_a_plain_cuda_is_recorded_as_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With another current one, the step's ops are others."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    found = []
    for current in (0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        session = Session(Traces(Options()), {})
        found.append(session._placed([], {"device": torch.device("cuda"), "pin_memory": False}))
    assert found == [{"device": torch.device("cuda", index), "pin_memory": False} for index in (0, 1)]
