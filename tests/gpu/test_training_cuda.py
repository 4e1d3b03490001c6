"""Tests of training on a GPU: losses and parameters agree with eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import dynaxla
from support.comparisons.gpu_comparison import MARKS, assert_close, assert_close_together
from support.comparisons.gpu_comparison import full_precision as full_precision

pytestmark = [*MARKS, pytest.mark.usefixtures("full_precision")]

DEVICE = "cuda"

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
    "capturable adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, capturable=DEVICE == "cuda"),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5)]
    return nn.Sequential(*layers).to(DEVICE)


def batches(count: int = 4) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(4, 3, 8, 8, generator=generator).to(DEVICE), torch.randint(0, 5, (4,), generator=generator).to(DEVICE))
        for _ in range(count)
    ]


def step_of(call: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(call(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def assert_same_training(mine: Callable[..., torch.Tensor], theirs: Callable[..., torch.Tensor], nets: list[nn.Module]) -> None:
    for x, y in batches():
        assert_close(mine(x, y), theirs(x, y), 2e-3)
    assert_close_together(*(list(net.parameters()) for net in nets), 2e-2)
    assert_close_together(*(list(net.buffers()) for net in nets), 1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_of_a_compiled_model(name: str) -> None:
    nets = [network(), network()]
    mine, theirs = (OPTIMIZERS[name](net.parameters()) for net in nets)
    assert_same_training(step_of(torch.compile(nets[0], backend="dynaxla"), mine), step_of(nets[1], theirs), nets)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_with_a_compiled_step(name: str) -> None:
    nets = [network(), network()]
    mine, theirs = (OPTIMIZERS[name](net.parameters()) for net in nets)
    assert_same_training(dynaxla.compile_step(step_of(nets[0], mine), fullgraph=True), step_of(nets[1], theirs), nets)


def test_step_that_reads_its_loss_runs_in_eager_mode() -> None:
    nets, losses_of_both = [network(), network()], ([], [])

    def step_with_losses(net: nn.Module, losses: list[float]) -> Callable[..., torch.Tensor]:
        optimizer = OPTIMIZERS["sgd"](net.parameters())

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(net(x), y)
            losses.append(loss.item())
            if losses[-1] < 100:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    assert_same_training(
        dynaxla.compile_step(step_with_losses(nets[0], losses_of_both[0])), step_with_losses(nets[1], losses_of_both[1]), nets
    )
    assert losses_of_both[0] == pytest.approx(losses_of_both[1], rel=2e-3)


@pytest.mark.parametrize("way", ["model", "step"])
def test_scaled_gradients(way: str) -> None:
    """float16 by autocast, with a scaler that checks for infinities."""
    nets = [network(), network()]
    scalers = [torch.amp.GradScaler(DEVICE, init_scale=1024.0) for _ in nets]
    optimizers = [OPTIMIZERS["sgd"](net.parameters()) for net in nets]

    def make(call: Callable[..., torch.Tensor], number: int) -> Callable[..., torch.Tensor]:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast(DEVICE, torch.float16):
                loss = F.cross_entropy(call(x).float(), y)
            scalers[number].scale(loss).backward()
            scalers[number].step(optimizers[number])
            scalers[number].update()
            optimizers[number].zero_grad()
            return loss.detach()

        return step

    mine = make(torch.compile(nets[0], backend="dynaxla"), 0) if way == "model" else dynaxla.compile_step(make(nets[0], 0))
    theirs = make(nets[1], 1)
    for x, y in batches():
        assert_close(mine(x, y), theirs(x, y), 3e-2)
    assert scalers[0].get_scale() == scalers[1].get_scale()


def test_dropout() -> None:
    """The backward pass uses the forward pass's mask. Equal seeds give equal masks, other seeds others."""
    x = torch.ones(64, 64, device=DEVICE, requires_grad=True)
    compiled = torch.compile(lambda x: F.dropout(x, 0.25), backend="dynaxla")
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        x.grad = None
        result = compiled(x)
        result.sum().backward()
        assert torch.equal(result.detach(), x.grad)
        results.append(result.detach())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])
    assert (results[0] > 0).float().mean().item() == pytest.approx(0.75, abs=0.03)
    assert_close(results[0][results[0] > 0].unique(), torch.tensor([1 / 0.75], device=DEVICE))


def test_calls_advance_torchs_random_generator() -> None:
    """Each call draws new numbers, and torch's next draw differs from a draw without calls."""
    compiled = torch.compile(lambda x: x + torch.randn_like(x), backend="dynaxla")
    x = torch.zeros(1000, device=DEVICE)
    torch.manual_seed(3)
    untouched = torch.randn(1000, device=DEVICE)
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    after = torch.randn(1000, device=DEVICE)
    assert not torch.equal(first, second)
    assert not torch.equal(after, untouched)
    assert first.mean().item() == pytest.approx(0, abs=0.15)
    assert first.std().item() == pytest.approx(1, abs=0.15)


def test_batches_from_pinned_memory() -> None:
    """Batches are copied to the device while the previous step may still run."""
    x, y = torch.randn(32, 3, 8, 8), torch.randint(0, 5, (32,))
    nets = [network(), network()]
    steps: list[Any] = [step_of(call, OPTIMIZERS["sgd"](net.parameters())) for call, net in zip(
        (torch.compile(nets[0], backend="dynaxla"), nets[1]), nets, strict=True)]  # fmt: skip
    losses = []
    for step in steps:
        loader = DataLoader(TensorDataset(x, y), batch_size=4, pin_memory=DEVICE == "cuda")
        losses.append([step(*(part.to(DEVICE, non_blocking=True) for part in batch)) for batch in loader])
    assert_close(*losses, 5e-3)


def test_checkpoint_of_a_compiled_step_continues_in_eager_mode() -> None:
    """The compiled step and eager mode continue with equal losses."""
    net = network()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    step = dynaxla.compile_step(step_of(net, optimizer), fullgraph=True)
    (first, *rest) = batches()
    step(*first)
    other_net = network()
    other_optimizer = OPTIMIZERS["adamw"](other_net.parameters())
    other_net.load_state_dict(copy.deepcopy(net.state_dict()))
    other_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    eager_step = step_of(other_net, other_optimizer)
    for batch in rest:
        assert_close(step(*batch), eager_step(*batch), 2e-3)
