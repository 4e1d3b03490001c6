"""Training steps whose Python code prints, logs values, counts, schedules, averages, or draws random numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint

from cases.effects.world import Step, World, case, loss_of, plain, train, world


@case
def prints() -> tuple[World, Step]:
    here = world()

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y)
        print(f"loss {loss.item():.4f}")
        train(here, loss)
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
        train(here, loss)
        here.more["scheduler"].step()
        return loss

    return here, step


@case
def plateau() -> tuple[World, Step]:
    here = world()
    here.more["scheduler"] = torch.optim.lr_scheduler.ReduceLROnPlateau(here.optimizer, patience=0, factor=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y)
        train(here, loss)
        here.more["scheduler"].step(loss.detach())
        return loss

    return here, step


@case
def averages() -> tuple[World, Step]:
    here = world()
    here.more["average"] = swa_utils.AveragedModel(here.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(here, x, y)
        train(here, loss)
        here.more["average"].update_parameters(here.model)
        return loss

    return here, step


@case
def swa() -> tuple[World, Step]:
    here = world()
    here.more["average"] = swa_utils.AveragedModel(here.model, use_buffers=True)
    here.more["scheduler"] = swa_utils.SWALR(here.optimizer, swa_lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        train(here, loss_of(here, x, y))
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
    """torch draws the numbers, so they are those of eager mode."""
    here = world(dropout=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        noisy = x + 0.1 * torch.randn_like(x) + torch.rand(6)
        loss = loss_of(here, noisy, y)
        here.log.append(loss.item())
        train(here, loss)
        return torch.bernoulli(torch.full((3,), 0.5)) + loss.detach()

    return here, step


@case
def checkpoints() -> tuple[World, Step]:
    """The recomputation drops the same activations."""
    here = world(dropout=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = checkpoint(here.model[2:], here.model[1](here.model[0](x)), use_reentrant=False)
        loss = F.mse_loss(out, y)
        here.log.append(loss.item())
        train(here, loss)
        return loss

    return here, step


@case
def checkpoints_again() -> tuple[World, Step]:
    here = world(dropout=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = checkpoint(here.model[2:], here.model[1](here.model[0](x)), use_reentrant=True)
        here.log.append(out.sum().item())
        train(here, F.mse_loss(out, y))
        return out

    return here, step
