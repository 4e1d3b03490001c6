"""`python -m benchmarks.watch`: the cost of checking that the Python objects that a training step reads have not changed, on one core."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dynaxla.guards.object_walker import walk
from dynaxla.guards.observation import observe


def step_of(layers: int, closures: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a step of SGD for a model with this number of linear layers (two parameters each), and this number of closures."""
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4) for _ in range(layers)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def closure(number: int) -> Callable[[torch.Tensor], torch.Tensor]:
        factor, shift = 1.0 + number, {"shift": number}
        return lambda x: x * factor + shift["shift"]

    functions = [closure(number) for number in range(closures)]

    def step(x: torch.Tensor) -> torch.Tensor:
        for layer in model:
            x = layer(x)
        for function in functions:
            x = function(x)
        loss = x.square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def measure(layers: int = 500, closures: int = 10, rounds: int = 500) -> dict[str, Any]:
    """Returns microseconds of a check (minimum, median, minimum beyond 0.15 µs per tensor), and the numbers of entries and tensors."""
    step = step_of(layers, closures)
    x = torch.ones(2, 4)
    for _ in range(2):
        _, observation = observe(step, (x,), {})
    around = walk({"step": step}, None, observation.executed_code)
    inputs = frozenset(
        (f"{path}.param_groups[{index}]", "lr")
        for path, optimizer in around.optimizers.items()
        for index, _ in enumerate(optimizer.param_groups)
    )
    assert around.is_unchanged(inputs)
    assert not around.incomparable
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        around.is_unchanged(inputs)
        times.append((time.perf_counter() - started) * 1e6)
    tensors = len(around.tensors)
    return {
        "entries": sum(len(holder.items) for holder in around.containers.values()),
        "tensors": tensors,
        "minimum_us": min(times),
        "median_us": statistics.median(times),
        "beyond_tensors_us": min(times) - 0.15 * tensors,
    }


def main() -> None:
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    for name, value in measure().items():
        print(f"{name:20} {value:10.1f}" if isinstance(value, float) else f"{name:20} {value:10}")


if __name__ == "__main__":
    main()
