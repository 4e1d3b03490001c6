"""Training steps that use tensors in ways that a program cannot repeat, or easily gets wrong: memory, graphs, numbers, views."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import dynaxla
from cases.effects.world import Step, World, case, loss_of, plain, train, world


@case
def selects() -> tuple[World, Step]:
    """Sizes that depend on values."""
    here = world()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = here.model(x)
        chosen = out[out > 0]
        rows = torch.nonzero(y.sum(1) > 0)[:, 0]
        loss = chosen.square().sum() / max(chosen.numel(), 1) + F.mse_loss(out[rows], y[rows]) if len(rows) else out.sum()
        train(here, loss)
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
def python_random_numbers() -> tuple[World, Step]:
    here = world()
    here.more["random"] = random.Random(3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y) * here.more["random"].random()
        train(here, loss)
        return loss

    return here, step


@case
def writes_between() -> tuple[World, Step]:
    """Writes to live tensors before and after their values are read, through views, and to tensors that autograd has saved."""
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
    compiled(torch.randn(5, 6)).sum().backward()  # so programs exist already
    here.optimizer.zero_grad()
    whole = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.mse_loss(compiled(whole(x)), y)
        here.log.append(loss.item())
        train(here, loss)
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
    """Results with an autograd graph stay alive from call to call."""
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
    """A Python number that is an index changes at each call."""
    here = world()
    here.more["at"] = 0

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        at = here.more["at"] = (here.more["at"] + 1) % 5
        loss = loss_of(here, x, y) + (x[at] * torch.arange(at, at + 6)).sum() * here.model[4].bias.sum()
        here.log.append(loss.item())
        train(here, loss)
        return loss

    return here, step


@case
def changes_numbers() -> tuple[World, Step]:
    """Python numbers that change, for each kind of argument of ATen ops: some become inputs, some cannot."""
    here = world()
    here.more["calls"] = 0

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        here.more["calls"] += 1
        calls, part = here.more["calls"], 0.1 * here.more["calls"]
        results = [
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
        results += torch._foreach_mul([x, y], [part, 2 * part])
        here.log.append(results[0].sum().item())
        loss = loss_of(here, x, y) * part
        train(here, loss)
        return [loss, *results]

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
    """Results with `out` tensors that are resized, and writes through conjugates."""
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
        train(here, loss)
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
