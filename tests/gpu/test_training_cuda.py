"""Training on a GPU: losses and parameters go the way that they go in eager mode."""

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


def assert_same_way(mine: Callable[..., torch.Tensor], theirs: Callable[..., torch.Tensor], nets: list[nn.Module]) -> None:
    for x, y in batches():
        assert_close(mine(x, y), theirs(x, y), 2e-3)
    assert_close_together(*(list(net.parameters()) for net in nets), 2e-2)
    assert_close_together(*(list(net.buffers()) for net in nets), 1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_model(name: str) -> None:
    nets = [network(), network()]
    mine, theirs = (OPTIMIZERS[name](net.parameters()) for net in nets)
    assert_same_way(step_of(torch.compile(nets[0], backend="dynaxla"), mine), step_of(nets[1], theirs), nets)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_compiled_step(name: str) -> None:
    nets = [network(), network()]
    mine, theirs = (OPTIMIZERS[name](net.parameters()) for net in nets)
    assert_same_way(dynaxla.compile_step(step_of(nets[0], mine), fullgraph=True), step_of(nets[1], theirs), nets)


def test_a_step_that_looks_at_its_loss() -> None:
    """It runs in eager mode."""
    nets, seen = [network(), network()], ([], [])

    def watching(net: nn.Module, losses: list[float]) -> Callable[..., torch.Tensor]:
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

    assert_same_way(dynaxla.compile_step(watching(nets[0], seen[0])), watching(nets[1], seen[1]), nets)
    assert seen[0] == pytest.approx(seen[1], rel=2e-3)


@pytest.mark.parametrize("way", ["model", "step"])
def test_scaled_gradients(way: str) -> None:
    """float16 by autocast, with a scaler that looks for infinities."""
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
    """The backward pass has the forward pass's mask; a seed repeats it; calls differ."""
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


def test_random_numbers_go_on() -> None:
    """Each call draws others, and torch's generator has moved when it is asked next."""
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
    """Copied to the device while the step before may still run."""
    x, y = torch.randn(32, 3, 8, 8), torch.randint(0, 5, (32,))
    nets = [network(), network()]
    steps: list[Any] = [step_of(call, OPTIMIZERS["sgd"](net.parameters())) for call, net in zip(
        (torch.compile(nets[0], backend="dynaxla"), nets[1]), nets, strict=True)]  # fmt: skip
    found = []
    for step in steps:
        loader = DataLoader(TensorDataset(x, y), batch_size=4, pin_memory=DEVICE == "cuda")
        found.append([step(*(part.to(DEVICE, non_blocking=True) for part in batch)) for batch in loader])
    assert_close(*found, 5e-3)


def test_a_state_that_is_loaded() -> None:
    """A checkpoint of eager mode's goes on in a compiled step, and the other way around."""
    net = network()
    optimizer = OPTIMIZERS["adamw"](net.parameters())
    step = dynaxla.compile_step(step_of(net, optimizer), fullgraph=True)
    (first, *rest) = batches()
    step(*first)
    other = network()
    another = OPTIMIZERS["adamw"](other.parameters())
    other.load_state_dict(copy.deepcopy(net.state_dict()))
    another.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    plain = step_of(other, another)
    for batch in rest:
        assert_close(step(*batch), plain(*batch), 2e-3)
