"""Trains a small convolutional network on generated digits in three ways: eager, compiled model, compiled step.

    python examples/train_mnist_like.py

Digits of a font with 5 by 7 dots are moved, stretched and covered with noise, so nothing is downloaded. Each way must reach an accuracy of
97% on unseen digits. With the option exact_rng, all ways use the same dropout masks, so the losses agree until rounding errors have grown
with the steps.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import dynaxla

OPTIONS = {"exact_rng": True}
WAYS = ("eager", "compiled model", "compiled step")
ACCURACY = 0.97

# Rows of five dots, as binary numbers.
FONT = [
    (14, 17, 19, 21, 25, 17, 14),
    (4, 12, 4, 4, 4, 4, 14),
    (14, 17, 1, 2, 4, 8, 31),
    (31, 2, 4, 2, 1, 17, 14),
    (2, 6, 10, 18, 31, 2, 2),
    (31, 16, 30, 1, 1, 17, 14),
    (6, 8, 16, 30, 17, 17, 14),
    (31, 1, 2, 4, 8, 8, 8),
    (14, 17, 17, 14, 17, 17, 14),
    (14, 17, 17, 15, 1, 2, 12),
]


def digits(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns pictures, float32 (count, 1, 28, 28), and their digits, int64 (count,)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    glyphs = torch.tensor([[[row >> (4 - column) & 1 for column in range(5)] for row in glyph] for glyph in FONT], dtype=torch.float32)
    scale = 0.9 + 0.6 * torch.rand(count, 2, generator=generator)
    shift = 0.3 * torch.randn(count, 2, generator=generator).clamp(-2, 2)
    slant = 0.2 * torch.randn(count, generator=generator)
    zero = torch.zeros(count)
    maps = torch.stack([scale[:, 0] * 1.4, slant, shift[:, 0], zero, scale[:, 1], shift[:, 1] * 0.6], 1).view(count, 2, 3)
    grid = F.affine_grid(maps, [count, 1, 28, 28], align_corners=False)
    pictures = F.grid_sample(glyphs[labels][:, None], grid, align_corners=False)
    return pictures + 0.25 * torch.randn(pictures.shape, generator=generator), labels


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32 * 7 * 7, 10),
    )


def training_step(way: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    net = torch.compile(model, backend="dynaxla", options=OPTIONS) if way == "compiled model" else model

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return dynaxla.compile_step(step, options=OPTIONS) if way == "compiled step" else step


def train(way: str, model: nn.Module, steps: int, batch: int = 64) -> tuple[list[float], float]:
    """Returns the losses, and the seconds of a step, without the first two steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps, cycle_momentum=False)
    step = training_step(way, model, optimizer)
    pictures, labels = digits(steps * batch, seed=1)
    torch.manual_seed(1)
    losses, started = [], time.perf_counter()
    for number in range(steps):
        chosen = slice(number * batch, (number + 1) * batch)
        losses.append(step(pictures[chosen], labels[chosen]).item())
        scheduler.step()
        if number == 1:
            started = time.perf_counter()
    return losses, (time.perf_counter() - started) / max(steps - 2, 1)


def accuracy(model: nn.Module) -> float:
    pictures, labels = digits(2000, seed=2)
    with torch.no_grad():
        return (model.eval()(pictures).argmax(1) == labels).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150)
    steps = parser.parse_args().steps
    torch.manual_seed(0)
    start = network()
    reference: list[float] = []
    for way in WAYS:
        model = copy.deepcopy(start)
        losses, seconds = train(way, model, steps)
        reference = reference or losses
        early, late = (max(map(abs, map(float.__sub__, losses[part], reference[part]))) for part in (slice(20), slice(20, None)))
        reached = accuracy(model)
        print(
            f"{way:15} accuracy {reached:.1%}, last losses {sum(losses[-20:]) / 20:.4f}, {1000 * seconds:.1f} ms a step; "
            f"losses differ from eager's by at most {early:.0e} in the first 20 steps, {late:.0e} later"
        )
        if reached < ACCURACY:
            raise SystemExit(f"the accuracy is below {ACCURACY:.0%}")


if __name__ == "__main__":
    main()
