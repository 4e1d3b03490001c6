"""compile_step's lazy way: steps whose Python has effects, or looks at values, against the same steps in eager mode.

Each case is made twice; the two must do the same to tensors, optimizers, Python's objects and whatever they log, call by call.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

import dynaxla
from dynaxla.observe import metrics
from dynaxla.runtime import hollow

Step = Callable[[torch.Tensor, torch.Tensor], Any]


@dataclass
class World:
    """What a step has around it. Attributes: log (what it says); more (other state, compared by its state_dict or value)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    log: list[Any] = field(default_factory=list)
    more: dict[str, Any] = field(default_factory=dict)


def net(dropout: float = 0.0) -> nn.Module:
    # No bias before the batch norm: its gradient would be nothing but rounding.
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 4))


def world(make: Callable[[Any], torch.optim.Optimizer] | None = None, dropout: float = 0.0) -> World:
    torch.manual_seed(0)
    model = net(dropout)
    return World(model, (make or (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9)))(model.parameters()))


def loss_of(here: World, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(here.model(x), y)


CASES: dict[str, Callable[[], tuple[World, Step]]] = {}


def case(function: Callable[[], tuple[World, Step]]) -> Callable[[], tuple[World, Step]]:
    CASES[function.__name__] = function
    return function


@case
def prints() -> tuple[World, Step]:
    here = world()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y)
        print(f"loss {loss.item():.4f}")
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        print("done", loss.detach())
        return loss

    return here, step


@case
def logs_values() -> tuple[World, Step]:
    here = world(torch.optim.AdamW)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        here.optimizer.zero_grad()
        loss = loss_of(here, x, y)
        loss.backward()
        here.optimizer.step()
        here.log.append(loss.item())
        here.log.append(loss.detach())
        here.log.append({"max": float(here.model[0].weight.detach().max()), "shape": list(x.shape), "grad": here.model[0].weight.grad})

    return here, step


@case
def counts() -> tuple[World, Step]:
    here = world()
    here.more["steps"] = 0

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        here.more["steps"] += 1
        loss = loss_of(here, x, y) * (1 / here.more["steps"])
        loss.backward()
        if here.more["steps"] % 2 == 0:
            here.optimizer.step()
            here.optimizer.zero_grad()
        return loss

    return here, step


@case
def branches() -> tuple[World, Step]:
    here = world()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y)
        if loss > 1.0:
            loss = loss * 0.5
            here.log.append("large")
        loss.backward()
        norm = nn.utils.clip_grad_norm_(here.model.parameters(), 0.5)
        if torch.isfinite(norm):
            here.optimizer.step()
        here.optimizer.zero_grad()
        return loss

    return here, step


@case
def schedules() -> tuple[World, Step]:
    here = world(lambda parameters: torch.optim.AdamW(parameters, lr=0.05))
    here.more["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(here.optimizer, 10)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y)
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        here.more["scheduler"].step()
        return loss

    return here, step


@case
def plateau() -> tuple[World, Step]:
    here = world()
    here.more["scheduler"] = torch.optim.lr_scheduler.ReduceLROnPlateau(here.optimizer, patience=0, factor=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y)
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        here.more["scheduler"].step(loss.detach())
        return loss

    return here, step


@case
def averages() -> tuple[World, Step]:
    here = world()
    here.more["average"] = swa_utils.AveragedModel(here.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y)
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        here.more["average"].update_parameters(here.model)
        return loss

    return here, step


@case
def swa() -> tuple[World, Step]:
    here = world()
    here.more["average"] = swa_utils.AveragedModel(here.model, use_buffers=True)
    here.more["scheduler"] = swa_utils.SWALR(here.optimizer, swa_lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        loss_of(here, x, y).backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        here.more["average"].update_parameters(here.model)
        here.more["scheduler"].step()

    return here, step


@case
def scales() -> tuple[World, Step]:
    here = world()
    here.more["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-60, growth_interval=2)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=False):
            loss = loss_of(here, x, y) * 2.0**10  # overflows at first
        here.more["scaler"].scale(loss).backward()
        here.more["scaler"].unscale_(here.optimizer)
        nn.utils.clip_grad_norm_(here.model.parameters(), 1.0)
        here.more["scaler"].step(here.optimizer)
        here.more["scaler"].update()
        here.optimizer.zero_grad()
        return loss

    return here, step


@case
def adafactor() -> tuple[World, Step]:
    here = world(lambda parameters: torch.optim.Adafactor(parameters, lr=0.05))
    return here, plain(here)


def plain(here: World) -> Step:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y)
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        return loss

    return step


@case
def lbfgs() -> tuple[World, Step]:
    here = world(lambda parameters: torch.optim.LBFGS(parameters, max_iter=4, line_search_fn="strong_wolfe"))

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        def closure() -> torch.Tensor:
            here.optimizer.zero_grad()
            loss = loss_of(here, x, y)
            loss.backward()
            return loss

        return here.optimizer.step(closure)

    return here, step


@case
def drops() -> tuple[World, Step]:
    """torch draws the numbers, so they are eager mode's."""
    here = world(dropout=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noisy = x + 0.1 * torch.randn_like(x) + torch.rand(6)
        loss = loss_of(here, noisy, y)
        here.log.append(loss.item())
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        return torch.bernoulli(torch.full((3,), 0.5)) + loss.detach()

    return here, step


@case
def checkpoints() -> tuple[World, Step]:
    """The same activations are dropped in the second run."""
    here = world(dropout=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = checkpoint(here.model[2:], here.model[1](here.model[0](x)), use_reentrant=False)
        loss = F.mse_loss(out, y)
        here.log.append(loss.item())
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        return loss

    return here, step


@case
def checkpoints_again() -> tuple[World, Step]:
    here = world(dropout=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = checkpoint(here.model[2:], here.model[1](here.model[0](x)), use_reentrant=True)
        here.log.append(out.sum().item())
        F.mse_loss(out, y).backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        return out

    return here, step


@case
def selects() -> tuple[World, Step]:
    """Sizes that depend on values."""
    here = world()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = here.model(x)
        chosen = out[out > 0]
        rows = torch.nonzero(y.sum(1) > 0)[:, 0]
        loss = chosen.square().sum() / max(chosen.numel(), 1) + F.mse_loss(out[rows], y[rows]) if len(rows) else out.sum()
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        return chosen

    return here, step


@case
def reads_memory() -> tuple[World, Step]:
    here = world()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        out = here.model(x)
        here.log.append(out.detach().numpy().sum())
        here.log.append(np.asarray(out.detach()[0]).tolist())
        loss = F.mse_loss(out, y)
        loss.backward()
        here.log.append(str(here.model[0].weight.grad))
        here.log.append(copy.deepcopy(here.model.state_dict()))
        here.optimizer.step()
        here.log.append(repr(here.model[4].bias))
        here.log.append(copy.deepcopy(here.model[4].bias.grad))
        here.optimizer.zero_grad()
        return loss.tolist()

    return here, step


@case
def chance() -> tuple[World, Step]:
    here = world()
    here.more["random"] = random.Random(3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y) * here.more["random"].random()
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        return loss

    return here, step


@case
def writes_between() -> tuple[World, Step]:
    """Writes to what is alive, before and after values are looked at, through views, and to what autograd has saved elsewhere."""
    here = world()
    here.more["sums"] = torch.zeros(3, 4)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        sums = here.more["sums"]
        out = here.model(x)
        with torch.no_grad():
            sums[0] += out.sum(0)
            sums.t()[1] = sums[0, 0]
        here.log.append(sums[0, 0].item())
        kept = out.detach().clone()
        view = kept[1:, :2]
        view.mul_(2).add_(1)
        here.log.append(view.sum().item())
        view.zero_()
        loss = F.mse_loss(out, y)
        loss.backward()
        with torch.no_grad():
            for parameter in here.model.parameters():
                parameter.sub_(0.1 * parameter.grad)
                parameter.grad.zero_()
            sums[2].copy_(kept.sum(0))
            sums += 1
        return kept, sums[1:], here.model[0].weight

    return here, step


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        if x.sum() > 0:
            return grad * 2
        return grad * 2 + 0 * x


@case
def functions_and_hooks() -> tuple[World, Step]:
    here = world()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = Doubled.apply(here.model[0](x))
        hidden.register_hook(lambda grad: here.log.append(grad.norm().item()))
        loss = F.mse_loss(here.model[1:](hidden), y)
        (first,) = torch.autograd.grad(loss, [hidden], create_graph=True)
        (loss + first.square().sum()).backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        return loss

    return here, step


@case
def fails_at_times() -> tuple[World, Step]:
    here = world()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        here.log.append("in")
        loss = loss_of(here, x, y)
        loss.backward()
        here.optimizer.step()
        if len(here.log) == 4:
            raise KeyError("in the middle")
        here.optimizer.zero_grad()
        here.log.append("out")
        return loss

    return here, step


@case
def compiled_inside() -> tuple[World, Step]:
    here = world()
    compiled = torch.compile(here.model, backend="dynaxla")
    compiled(torch.randn(5, 6)).sum().backward()  # it has programs already
    here.optimizer.zero_grad()
    whole = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(compiled(whole(x)), y)
        here.log.append(loss.item())
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        return loss

    return here, step


@case
def nested() -> tuple[World, Step]:
    here = world()

    @dynaxla.compile_step
    def inner(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y)
        loss.backward()
        return loss

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = inner(x, y)
        here.log.append(loss.item())
        here.optimizer.step()
        here.optimizer.zero_grad()
        return loss

    return here, step


@case
def keeps_graphs() -> tuple[World, Step]:
    """Results with a graph behind them stay in Python's hands from call to call."""
    here = world()
    here.more["state"] = torch.zeros(5, 4)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = here.model(x) + 0.1 * here.more["state"]
        here.more["state"] = out.detach()
        kept = out * 2
        loss = F.mse_loss(kept, y)
        loss.backward(retain_graph=True)
        here.log.append(float(loss.detach()))
        (0.5 * loss).backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        here.log.append([view.detach() for view in kept.detach().split(2)])
        return kept

    return here, step


@case
def accumulates() -> tuple[World, Step]:
    here = world()
    here.more["calls"] = 0

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        here.more["calls"] += 1
        for rows in range(0, 4, 2):
            (loss_of(here, x[rows : rows + 3], y[rows : rows + 3]) / 2).backward()
        here.log.append(next(here.model.parameters()).grad.norm().item())
        if here.more["calls"] % 3 == 0:
            here.optimizer.step()
            here.optimizer.zero_grad(set_to_none=here.more["calls"] % 2 == 0)

    return here, step


@case
def sets_data() -> tuple[World, Step]:
    here = world(lambda parameters: torch.optim.SGD(parameters, lr=0.1))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y)
        loss.backward()
        here.log.append(loss.item())
        for parameter in here.model.parameters():
            parameter.data = parameter.data - 0.1 * parameter.grad
            parameter.grad = None
        last = here.model[4].weight
        with torch.no_grad():
            last.data.t()[0].mul_(0.9)
            vector = torch.nn.utils.parameters_to_vector(here.model.parameters())
            torch.nn.utils.vector_to_parameters(vector * 0.99, here.model.parameters())
        return last.detach().t().contiguous()

    return here, step


@case
def changes_indices() -> tuple[World, Step]:
    """A number that says where to read is another one at every call."""
    here = world()
    here.more["at"] = 0

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        at = here.more["at"] = (here.more["at"] + 1) % 5
        loss = loss_of(here, x, y) + (x[at] * torch.arange(at, at + 6)).sum() * here.model[4].bias.sum()
        here.log.append(loss.item())
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        return loss

    return here, step


@case
def changes_numbers() -> tuple[World, Step]:
    """Of every kind, where ATen takes numbers: some become inputs, some cannot."""
    here = world()
    here.more["calls"] = 0

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        here.more["calls"] += 1
        calls, part = here.more["calls"], 0.1 * here.more["calls"]
        made = [
            torch.full_like(x, calls, dtype=torch.int64),
            torch.full_like(x, part),
            torch.div(x, part, rounding_mode="floor"),
            torch.div(x, calls),
            x.add(y.sum(), alpha=part),
            torch.lerp(x, x * 2, part),
            (x * part).to(torch.bfloat16) * part,
            x.pow(part.is_integer() + 2),
            torch.where(x > part, x, part),
            (x > 0).to(torch.int64) * calls,
            x.clamp(-part, part),
            torch.addcmul(x, x, x, value=part),
            part - x,
            x.clone().fill_(part).sub_(calls),
        ]
        made += torch._foreach_mul([x, y], [part, 2 * part])
        here.log.append(made[0].sum().item())
        loss = loss_of(here, x, y) * part
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        return [loss, *made]

    return here, step


@case
def in_half() -> tuple[World, Step]:
    here = world()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = here.model(x)
            loss = F.mse_loss(out.float(), y)
        here.log.append(str(out.dtype))
        loss.backward()
        torch.nn.utils.clip_grad_value_(here.model.parameters(), 0.5)
        here.optimizer.step()
        here.optimizer.zero_grad()
        with torch.inference_mode():
            here.log.append(here.model.eval()(x).sum().item() > 1e9)
        here.model.train()
        return loss

    return here, step


@case
def fills_and_conjugates() -> tuple[World, Step]:
    """Results in tensors that grow for them, and writes through conjugates."""
    here = world()

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        here.log.append(x.sum().item())
        product = torch.empty(0)
        torch.mul(x, 2, out=product)
        number = torch.complex(x, x)
        mirrored = number.conj()
        mirrored.mul_(2)
        turned = torch.complex(x, x + 1).conj()
        turned.mul_(3)
        return [product, number, mirrored, turned.imag.clone()]

    return here, step


@case
def spectral() -> tuple[World, Step]:
    torch.manual_seed(0)
    model = nn.Sequential(torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 4))
    here = World(model, torch.optim.RMSprop(model.parameters(), lr=0.01))
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda parameter: here.log.append(parameter.grad.abs().max().item()))
    return here, plain(here)


@case
def recurs() -> tuple[World, Step]:
    torch.manual_seed(0)

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.read = nn.LSTM(3, 5, batch_first=True)
            self.last = nn.Linear(5, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.read(x.view(-1, 2, 3))[0][:, -1])

    model = Reader()
    here = World(model, torch.optim.Adam(model.parameters(), lr=0.01))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y)
        here.log.append(f"{loss.item():.3f}")
        loss.backward()
        here.optimizer.step()
        here.optimizer.zero_grad()
        return loss

    return here, step


@case
def convolves() -> tuple[World, Step]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.GELU(), nn.Flatten(), nn.Linear(24, 4)
    ).to(memory_format=torch.channels_last)
    here = World(model, torch.optim.AdamW(model.parameters(), lr=0.01, amsgrad=True))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y)
        loss.backward()
        total = torch.stack([parameter.grad.norm() for parameter in here.model.parameters()]).norm()
        here.log.append(total.item())
        here.optimizer.step()
        here.optimizer.zero_grad()
        return loss

    return here, step


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
