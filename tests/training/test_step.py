"""Tests of training/step.py: compile_step runs a whole training step as one program, with eager mode's results."""

from __future__ import annotations

import functools
import gc
import re
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch._library.simple_registry import singleton
from torch.nn import functional as F

import dynaxla
from dynaxla.errors import CaptureError, OptionError
from dynaxla.observe import metrics
from support import internals
from support.models.training_steps import OPTIMIZERS, Net, Step, assert_same, batches, graphs, plain, two

pytestmark = pytest.mark.quick


class Rows(Net):
    """Adds an embedding. Rows without a gradient so far have second moments of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.rows(x[:, 0].abs().to(torch.int64))


@pytest.mark.sample(usual=2, quick=6)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    """The learning rate is 0 in the first step, as in a warmup, and falls later."""
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS[name], Rows)
    eager, compiled = plain(eager_model, eager_optimizer), dynaxla.compile_step(plain(compiled_model, compiled_optimizer))
    initial_lr = eager_optimizer.param_groups[0]["lr"]
    for number, (x, y) in enumerate(batches(6)):
        for group in [*eager_optimizer.param_groups, *compiled_optimizer.param_groups]:
            group["lr"] = initial_lr * (0.0, 0.5, 1.0, 1.0, 0.1, 0.3)[number]
        if number == 3:
            before = graphs()
        torch.testing.assert_close(compiled(x, y), eager(x, y).detach(), rtol=1e-4, atol=1e-5)
        # Muon computes products in bfloat16.
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer, 1e-2 if name == "Muon" else 1e-4)
    assert graphs() == before, "a step after the third was captured or compiled again"


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("maximize", [False, True], ids=["", "maximize"])
def test_fused_adam(maximize: bool, dtype: torch.dtype) -> None:
    """Eager's fused kernel computes half types in float32, as the program does."""
    settings = {"weight_decay": 0.1, "maximize": maximize, "fused": True, "amsgrad": True}
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(
        lambda model: torch.optim.Adam(model.to(dtype).parameters(), lr=0.01, **settings)
    )
    eager, compiled = plain(eager_model, eager_optimizer), dynaxla.compile_step(plain(compiled_model, compiled_optimizer))
    for x, y in batches(4):
        eager(x.to(dtype), y.to(dtype))
        compiled(x.to(dtype), y.to(dtype))
    assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer, 2e-2 if dtype == torch.bfloat16 else 1e-9)


def test_sizes_in_buckets_are_refused() -> None:
    with pytest.raises(OptionError, match=r"sizes='buckets'(.|\n)*compile only the model, with torch.compile"):
        dynaxla.compile_step(lambda: None, options={"sizes": "buckets"})


def test_changing_learning_rate_needs_one_program() -> None:
    _, _, compiled_model, compiled_optimizer = two(OPTIMIZERS["AdamW"])
    compiled = dynaxla.compile_step(plain(compiled_model, compiled_optimizer))
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(compiled_optimizer, 10)
    before = graphs()
    for x, y in batches(4):
        compiled(x, y)
        scheduler.step()
    assert [after - earlier for after, earlier in zip(graphs(), before, strict=True)] == [1, 1]


def test_new_op_entries_of_torch_are_not_new_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch creates an entry for an op when the op is first called under a dispatch mode, for example in a step's second call."""
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS["SGD momentum"])
    for x, y in batches(2):
        dynaxla.compile_step(plain(eager_model, eager_optimizer))(x, y)  # all ops have entries
    compiled = dynaxla.compile_step(plain(compiled_model, compiled_optimizer))
    before = graphs()
    for number, (x, y) in enumerate(batches(3)):
        if number == 1:
            monkeypatch.setattr(singleton, "_data", {})
        compiled(x, y)
    assert [after - earlier for after, earlier in zip(graphs(), before, strict=True)] == [1, 1]


def test_zero_grad_first() -> None:
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS["Adam"])

    def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            optimizer.zero_grad()
            out = model(x)
            loss = F.mse_loss(out, y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return {"loss": loss, "norm": norm, "out": out}

        return step

    eager, compiled = make_step(eager_model, eager_optimizer), dynaxla.compile_step(make_step(compiled_model, compiled_optimizer))
    before = graphs()
    for x, y in batches(3):
        expected, actual = eager(x, y), compiled(x, y)
        assert not any(value.requires_grad for value in actual.values())
        torch.testing.assert_close(actual, {key: value.detach() for key, value in expected.items()}, rtol=1e-4, atol=1e-5)
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer)
    assert graphs()[0] - before[0] == 1


def test_tensors_from_python_numbers() -> None:
    """Each call has new tensors, which it may write to and return."""
    _, _, model, optimizer = two(OPTIMIZERS["SGD"])

    @dynaxla.compile_step
    def step(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
        count, constant = torch.tensor(0.0), torch.tensor([1.0, 2.0])
        for x, y in parts:
            F.mse_loss(model(x), y).backward()
            count += 1
        optimizer.step()
        optimizer.zero_grad()
        return count, constant

    results = [step(batches(2)) for _ in range(3)]
    results[0][1].zero_()
    assert [count.item() for count, _ in results] == [2.0, 2.0, 2.0]
    assert [constant.tolist() for _, constant in results] == [[0.0, 0.0], [1.0, 2.0], [1.0, 2.0]]


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def gradient_steps(model: nn.Module, optimizer: torch.optim.Optimizer, old: list[torch.Tensor]) -> Step:
    """Returns a step that leaves its gradients, and reads the gradients in `old`."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        return torch.stack([gradient.sum() for gradient in old]).sum() if old else torch.zeros(())

    return step


def test_new_gradients_cause_no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step notes the objects that it replaces, so that no walk has to find them. Old gradients are freed."""
    walks = internals.object_walks(monkeypatch)
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS["SGD"])
    eager, compiled = (
        gradient_steps(eager_model, eager_optimizer, []),
        dynaxla.compile_step(gradient_steps(compiled_model, compiled_optimizer, [])),
    )
    steps = batches(6)
    for x, y in steps[:3]:
        eager(x, y), compiled(x, y)
    for x, y in steps[3:]:
        walks.clear()
        old = [weakref.ref(parameter.grad) for parameter in trainable(compiled_model)]
        eager(x, y), compiled(x, y)
        assert [list(roots) for roots in walks] == [["args", "kwargs"]]
        assert not any(reference() is not None for reference in old)
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer)
        torch.testing.assert_close(
            [p.grad for p in trainable(compiled_model)], [p.grad for p in trainable(eager_model)], rtol=1e-4, atol=1e-6
        )


def test_python_results_are_those_of_the_call() -> None:
    """The first call returns that there are no gradients, although all calls have the same graph."""
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS["SGD"])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor], Any]:
        def run(x: torch.Tensor) -> Any:
            known = ["gradients" if parameter.grad is not None else "none" for parameter in trainable(model)]
            optimizer.zero_grad()
            model(x).sum().backward()
            return known, len(set(known)), None if "none" in known else x

        return run

    eager, compiled = step(eager_model, eager_optimizer), dynaxla.compile_step(step(compiled_model, compiled_optimizer), fullgraph=True)
    for x, _ in batches(4):
        assert compiled(x)[:2] == eager(x)[:2]
        assert (compiled(x)[2] is x) == (eager(x)[2] is x)


def step_with_arguments(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A step that gets model and optimizer as arguments."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


SCHEDULES: dict[str, Callable[[dict[str, Any], int], None]] = {
    "lr": lambda group, number: group.update(lr=0.01 / (1 + number)),
    "momentum": lambda group, number: group.update(
        {"betas": (0.9 - 0.02 * number, 0.99)} if "betas" in group else {"momentum": 0.9 - 0.02 * number}
    ),
    "weight_decay": lambda group, number: group.update(weight_decay=0.02 * number),
}


@pytest.mark.sample(usual=4, quick=3)
@pytest.mark.parametrize("name", ["SGD with momentum", "Adam", "AdamW", "RMSprop", "NAdam", "RAdam", "Adamax"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("in_arguments", [False, True], ids=["closure", "argument"])
def test_schedules(in_arguments: bool, schedule: str, name: str) -> None:
    """Numbers of parameter groups change at every call. One program serves all calls after the fourth."""
    constructors = {
        "SGD with momentum": functools.partial(torch.optim.SGD, momentum=0.9),
        "RMSprop": functools.partial(torch.optim.RMSprop, momentum=0.9),
    }
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(
        lambda model: constructors.get(name, getattr(torch.optim, name, None))(model.parameters(), lr=0.01)
    )
    if in_arguments:
        eager, compiled = (
            functools.partial(step_with_arguments, eager_model, eager_optimizer),
            functools.partial(dynaxla.compile_step(step_with_arguments), compiled_model, compiled_optimizer),
        )
    else:
        eager, compiled = plain(eager_model, eager_optimizer), dynaxla.compile_step(plain(compiled_model, compiled_optimizer))
    for number, (x, y) in enumerate(batches(8)):
        for group in [*eager_optimizer.param_groups, *compiled_optimizer.param_groups]:
            SCHEDULES[schedule](group, number)
        if number == 4:
            before = graphs(), metrics.snapshot()["eager_steps"]
        torch.testing.assert_close(compiled(x, y), eager(x, y).detach(), rtol=1e-4, atol=1e-5)
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer, 1e-4)
    assert (graphs(), metrics.snapshot()["eager_steps"]) == before


class DecayedAboveThreshold(torch.optim.SGD):
    """Reads a setting in Python."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if group["weight_decay"] > 0.05:
                torch._foreach_mul_([parameter.detach() for parameter in group["params"]], 1 - group["weight_decay"])
        return super().step(closure)


def test_schedules_of_a_number_that_python_reads() -> None:
    """Each value has its own program. The learning rate, which Python does not read, remains an input."""
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(lambda model: DecayedAboveThreshold(model.parameters(), lr=0.01))
    eager, compiled = plain(eager_model, eager_optimizer), dynaxla.compile_step(plain(compiled_model, compiled_optimizer))
    for number, (x, y) in enumerate(batches(16)):
        for group in [*eager_optimizer.param_groups, *compiled_optimizer.param_groups]:
            group.update(lr=0.01 / (1 + number), weight_decay=0.01 if number % 4 < 2 else 0.1)
        if number == 12:
            before = graphs(), metrics.snapshot()["eager_steps"]
        torch.testing.assert_close(compiled(x, y), eager(x, y).detach(), rtol=1e-4, atol=1e-5)
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer, 1e-4)
    assert (graphs(), metrics.snapshot()["eager_steps"]) == before


def test_momentum_that_becomes_zero() -> None:
    """With a momentum of 0, torch's step leaves the momentum buffers as they are."""
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(
        lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    )
    eager, compiled = plain(eager_model, eager_optimizer), dynaxla.compile_step(plain(compiled_model, compiled_optimizer))
    for (x, y), momentum in zip(batches(12), [0.9, 0.8, 0.7, 0.6, 0.5, 0.0, 0.0, 0.0, 0.4, 0.3, 0.0, 0.2], strict=True):
        for group in [*eager_optimizer.param_groups, *compiled_optimizer.param_groups]:
            group["momentum"] = momentum
        torch.testing.assert_close(compiled(x, y), eager(x, y).detach(), rtol=1e-4, atol=1e-5)
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer, 1e-4)


def test_models_in_arguments_are_walked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of the model causes a walk. The step keeps only the last model alive."""
    walks = internals.object_walks(monkeypatch)
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS["AdamW"])
    compiled = dynaxla.compile_step(step_with_arguments)
    for number, (x, y) in enumerate(batches(8)):
        walks.clear()
        compiled(compiled_model, compiled_optimizer, x, y)
        step_with_arguments(eager_model, eager_optimizer, x, y)
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer)
        if number > 4:
            assert walks == [["args", "kwargs"]]
    third, fourth = two(OPTIMIZERS["AdamW"])[2:]
    compiled(third, fourth, x, y)
    assert ["step", "argument 0", "argument 1"] in walks
    reference = weakref.ref(compiled_model)
    del compiled_model, compiled_optimizer
    gc.collect()
    assert reference() is None


def test_new_learning_rates_cause_no_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers change the rates. Batches of another size cause a second recording, which does not outdate the first one."""
    walks = internals.object_walks(monkeypatch)
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS["AdamW"])
    eager, compiled = plain(eager_model, eager_optimizer), dynaxla.compile_step(plain(compiled_model, compiled_optimizer))
    schedulers = [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10) for optimizer in (eager_optimizer, compiled_optimizer)]
    for number, (x, y) in enumerate([*batches(6), *batches(3, 7), *batches(2)]):
        walks.clear()
        eager(x, y), compiled(x, y)
        if number in (4, 5, 8, 9, 10):
            assert [list(roots) for roots in walks] == [["args", "kwargs"]], number
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer)
        for scheduler in schedulers:
            scheduler.step()


def test_gradients_that_are_also_in_a_list() -> None:
    """A new tensor in `.grad` is not confused with the old one, which a list still holds."""
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS["SGD"])
    theirs: list[torch.Tensor] = []
    mine: list[torch.Tensor] = []
    eager, compiled = (
        gradient_steps(eager_model, eager_optimizer, theirs),
        dynaxla.compile_step(gradient_steps(compiled_model, compiled_optimizer, mine)),
    )
    for number, (x, y) in enumerate(batches(6)):
        torch.testing.assert_close(compiled(x, y), eager(x, y), rtol=1e-4, atol=1e-6)
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer)
        if number == 2:
            theirs += [parameter.grad for parameter in trainable(eager_model)]
            mine += [parameter.grad for parameter in trainable(compiled_model)]


def test_gradients_after_a_failed_step() -> None:
    _, _, model, optimizer = two(OPTIMIZERS["SGD"])

    @dynaxla.compile_step
    def step(x: torch.Tensor, index: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(x) * torch.ones(4)[index].sum()).sum().backward()
        optimizer.step()

    x = batches(1)[0][0]
    for _ in range(3):
        step(x, torch.tensor([3]))
    with pytest.raises(IndexError):
        step(x, torch.tensor([7]))
    assert all(parameter.grad is None for parameter in trainable(model))
    expected = [parameter.detach().clone() for parameter in trainable(model)]
    step(x, torch.tensor([2]))
    assert all(parameter.grad is not None for parameter in trainable(model))
    assert not any(torch.equal(parameter, before) for parameter, before in zip(trainable(model), expected, strict=True))


def test_accumulation() -> None:
    """Micro-batches within a step, and gradients left from one step to the next."""
    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS["AdamW"])

    def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(parts: list[tuple[torch.Tensor, torch.Tensor]], last: bool) -> torch.Tensor:
            total = torch.zeros(())
            for x, y in parts:
                loss = F.mse_loss(model(x), y) / len(parts)
                loss.backward()
                total += loss.detach()
            if last:
                optimizer.step()
                optimizer.zero_grad(set_to_none=False)
            return total

        return step

    eager, compiled = make_step(eager_model, eager_optimizer), dynaxla.compile_step(make_step(compiled_model, compiled_optimizer))
    for last in (False, True) * 4:
        torch.testing.assert_close(compiled(batches(2), last), eager(batches(2), last), rtol=1e-4, atol=1e-5)
        assert_same(eager_model, compiled_model, compiled_optimizer, eager_optimizer)


def test_dropout_depends_on_the_seed() -> None:
    def losses() -> list[float]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 8))
        compiled = dynaxla.compile_step(plain(model, torch.optim.AdamW(model.parameters())))
        torch.manual_seed(2)
        x, y = batches(1)[0]
        return [compiled(x, y).item() for _ in range(3)]

    first_losses = losses()
    assert first_losses == losses()
    assert len(set(first_losses)) == 3


def test_autocast_and_checkpoint() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)

    eager_model, eager_optimizer, compiled_model, compiled_optimizer = two(OPTIMIZERS["AdamW"], Model)

    def make_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.mse_loss(model(x).float(), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    eager, compiled = make_step(eager_model, eager_optimizer), dynaxla.compile_step(make_step(compiled_model, compiled_optimizer))
    for x, y in batches(3):
        torch.testing.assert_close(compiled(x, y), eager(x, y).detach(), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(dict(compiled_model.state_dict()), dict(eager_model.state_dict()), rtol=5e-2, atol=5e-2)


def test_arguments_that_require_gradients() -> None:
    """The first call with an argument creates its gradient, the second call adds to it."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (weight * x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def run(function: Step) -> list[torch.Tensor]:
        with torch.no_grad():
            weight.fill_(1.0)
        found = []
        for fill in (1.0, 2.0, 3.0):
            x = torch.full((3,), fill, requires_grad=True)
            found += [function(x).detach(), x.grad.clone(), function(x).detach(), x.grad.clone()]
        return found

    torch.testing.assert_close(run(dynaxla.compile_step(step, fullgraph=True)), run(step))


def test_failing_call_runs_once() -> None:
    calls = []

    @dynaxla.compile_step
    def step(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return x.view(2, 2).sum()

    for _ in range(3):
        with pytest.raises(RuntimeError, match="shape"):
            step(torch.ones(3))
    assert calls == [3, 3, 3]


@functools.lru_cache
def triangle(size: int) -> torch.Tensor:
    return torch.ones(size, size).tril()


def test_first_call_that_raises_capture_error_runs_once() -> None:
    calls = []

    @dynaxla.compile_step
    def step(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        raise CaptureError("of a step inside of this one")

    with pytest.raises(CaptureError, match="inside"):
        step(torch.ones(3))
    assert calls == [3]


def test_tensor_cached_by_a_step_is_not_fake() -> None:
    step = dynaxla.compile_step(lambda x: triangle(len(x)) @ x)
    for size in (3, 3, 3, 5, 5, 5, 3):
        x = torch.randn(size, 2)
        torch.testing.assert_close(step(x), torch.ones(size, size).tril() @ x)
    assert type(triangle(3)) is type(triangle(5)) is torch.Tensor


def test_step_that_uses_another_thread() -> None:
    with ThreadPoolExecutor(1) as pool:
        step = dynaxla.compile_step(lambda x: pool.submit(torch.sum, x * 2).result() + x)
        for value in range(6):
            x = torch.full((2,), float(value))
            torch.testing.assert_close(step(x), 4 * value + x)


def test_lengths_that_cpp_reads() -> None:
    """C++ reads the lengths without an op that a dispatch mode could observe."""
    torch.manual_seed(0)
    net = nn.GRU(3, 4, batch_first=True)

    def step(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(net(packed)[0], batch_first=True)[0].sum()

    compiled = dynaxla.compile_step(step)
    for last in (1, 2, 3, 1, 2):
        x, lengths = torch.randn(2, 5, 3), torch.tensor([5, last])
        torch.testing.assert_close(compiled(x, lengths), step(x, lengths).detach())


def test_step_is_observed_again_after_a_backoff() -> None:
    """Only the first calls read a value. After a backoff, the step is recorded."""
    number = torch.zeros(())
    reads = 0

    def step(x: torch.Tensor, verbose: bool) -> torch.Tensor:
        nonlocal reads
        number.add_(1)
        if verbose:
            reads += int(number.item() > 0)
        return x * number

    compiled = dynaxla.compile_step(step)
    metrics.reset()
    for call in range(1, 281):
        assert compiled(torch.ones(2), call < 6).tolist() == [call] * 2
    assert reads == 5
    assert metrics.snapshot()["steps"] >= 5


def test_step_that_reaches_too_many_values(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    internals.most_guarded_values(monkeypatch, 1000)
    data = [float(number) for number in range(2000)]

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * data[3]

    compiled = dynaxla.compile_step(step)
    metrics.reset()
    assert [compiled(torch.ones(1)).item() for _ in range(5)] == [3.0] * 5
    assert metrics.snapshot()["eager_steps"] == 5
    assert [record.levelname for record in caplog.records if "runs in eager mode: the step can reach more" in record.message] == ["WARNING"]
    with pytest.raises(dynaxla.errors.CaptureError, match=r"can reach more than 1000 values.*data"):
        dynaxla.compile_step(step, fullgraph=True)(torch.ones(1))


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda state, count: state["history"].append(count), r"state\['history'\]\[\d+\]"),
        (lambda state, count: state.update(name="x" * count), r"state\['name'\]"),
    ],
)
def test_log_names_object_that_differs_at_each_call(
    change: Callable[[dict[str, Any], int], None], path: str, caplog: pytest.LogCaptureFixture
) -> None:
    state: dict[str, Any] = {"history": [], "name": ""}

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * len(state["history"]) * len(state["name"])

    compiled = dynaxla.compile_step(step)
    for count in range(20):
        change(state, count)
        assert torch.equal(compiled(torch.ones(1)), step(torch.ones(1)))
    [message] = [record.message for record in caplog.records if "runs in eager mode" in record.message]
    assert re.search(f"{path}, which the step can reach, differs at each call", message)


@pytest.mark.parametrize("is_same", [False, True])
def test_step_that_sets_requires_grad_of_its_argument(is_same: bool) -> None:
    """The step sets `requires_grad` of its argument, a new tensor in each call or the same one. The program does that, too."""

    def make_step(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            x.requires_grad_()
            y = model(x)
            (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            loss = (slope + y).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    eager_model, _, compiled_model, _ = two(lambda model: None, lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
    eager, compiled = make_step(eager_model), dynaxla.compile_step(make_step(compiled_model))
    before = metrics.snapshot().get("eager_steps", 0)
    same = batches(1)[0][0], batches(1)[0][0]
    for x, _ in batches(8):
        mine, theirs = same if is_same else (x.clone(), x.clone())
        torch.testing.assert_close(compiled(mine), eager(theirs))
        assert mine.requires_grad
        torch.testing.assert_close(mine.grad, theirs.grad)
        torch.testing.assert_close(compiled_model.state_dict(), eager_model.state_dict())
    assert metrics.snapshot()["eager_steps"] - before <= 4


def test_step_that_freezes_parameters() -> None:
    def make_step(model: nn.Module) -> Callable[[torch.Tensor, bool], torch.Tensor]:
        def step(x: torch.Tensor, is_frozen: bool) -> torch.Tensor:
            weight = next(model.parameters())
            weight.requires_grad_(not is_frozen)
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    eager_model, _, compiled_model, _ = two(lambda model: None, lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)))
    eager, compiled = make_step(eager_model), dynaxla.compile_step(make_step(compiled_model))
    for number, (x, _) in enumerate(batches(16)):
        is_frozen = number % 4 > 1
        torch.testing.assert_close(compiled(x, is_frozen), eager(x, is_frozen))
        for mine, theirs in zip(compiled_model.parameters(), eager_model.parameters(), strict=True):
            assert mine.requires_grad == theirs.requires_grad
            torch.testing.assert_close(mine.grad, theirs.grad)


def test_step_that_sets_requires_grad_of_gradients() -> None:
    """This step runs in eager mode, because a call of a program releases old gradients first."""

    def make_step(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
        def step(x: torch.Tensor) -> torch.Tensor:
            weight = next(model.parameters())
            if weight.grad is not None:
                weight.grad.requires_grad_()
            weight.grad = None
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        return step

    eager_model, _, compiled_model, _ = two(lambda model: None, lambda: nn.Linear(6, 3))
    eager, compiled = make_step(eager_model), dynaxla.compile_step(make_step(compiled_model))
    for x, _ in batches(6):
        torch.testing.assert_close(compiled(x), eager(x))
        torch.testing.assert_close([item.grad for item in compiled_model.parameters()], [item.grad for item in eager_model.parameters()])


def test_calls_with_many_sizes() -> None:
    """Calls with new sizes are not counted as new states, after too many of which a step backs off."""
    step = dynaxla.compile_step(lambda x: (x * x).sum())
    metrics.reset()
    for _ in range(8):
        for size in range(1, 17):
            assert step(torch.full((size,), 2.0)).item() == 4 * size
    assert metrics.snapshot()["steps"] >= 32


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0] * 3 + 0 * ctx.saved_tensors[0]


def test_autograd_functions_are_part_of_the_program() -> None:
    weight = torch.ones(3, requires_grad=True)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = Doubled.apply(weight * x).sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        return gradient

    compiled = dynaxla.compile_step(step, fullgraph=True)
    for value in (1.0, 2.0):
        assert compiled(torch.full((3,), value)).tolist() == [3 * value] * 3
