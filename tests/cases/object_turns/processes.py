"""A step that trains two networks in turns, each on several processes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import dynaxla
from support.comparisons.compare import assert_equal


def agree_in_turns(build: Callable[[], nn.Module]) -> None:
    """One step trains two networks in turns, each with its optimizer. Parameters and the optimizers' state must be as in eager mode.

    Args:
        build: makes a network for several processes. Its inputs are rows of six numbers.
    """

    def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = net(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    width = 6
    for order, fullgraph in (([0, 1] * 3, True), ([0] * 4 + [1] * 4, False)):
        results = []
        for run in (step, dynaxla.compile_step(step, fullgraph=fullgraph)):
            sets = []
            for number in range(2):
                torch.manual_seed(number)
                net = build()
                sets.append((net, torch.optim.AdamW(net.parameters(), lr=0.1 / (1 + number))))
            losses = []
            for number, index in enumerate(order):
                x = torch.linspace(-1, 1, 4 * width).view(4, width) * (dist.get_rank() + 1) + number / 8
                losses.append(run(*sets[index], x).clone())
            states = [value for _, optimizer in sets for values in optimizer.state.values() for value in values.values()]
            tensors = [*(parameter for net, _ in sets for parameter in net.parameters()), *states]
            results.append([losses, [tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach() for tensor in tensors]])
        for result in results[1:]:
            assert_equal(result, results[0], tolerance=(1e-3, 1e-5))
