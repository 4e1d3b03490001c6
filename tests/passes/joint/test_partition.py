"""Tests of passes/joint/partition.py: the values that the forward graph saves for the backward graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from dynaxla.passes.joint.partition import partition
from support.fakes.several_devices import CPU, CUDA, names, to_device, traced


def mutating_function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(y)
    return y * 2


class MutatesBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.tensor([0.5, -1.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(x, torch.tanh(self.level))
        old_level = self.level.clone()
        self.level[0] = 2.0
        return loss + old_level.sum()


def test_gradient_of_buffer_mutated_after_use() -> None:
    gradients = []
    module = MutatesBuffer()
    for function in (module, torch.compile(copy.deepcopy(module), backend="dynaxla", fullgraph=True)):
        x = torch.tensor([3.0, 4.0], requires_grad=True)
        function(x).backward()
        gradients.append(x.grad)
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_gradient_of_mutated_input() -> None:
    gradients = []
    for function in (mutating_function, torch.compile(mutating_function, backend="dynaxla", fullgraph=True)):
        leaves = [torch.tensor([-1.0, 2.0], requires_grad=True), torch.tensor([3.0, 0.5], requires_grad=True)]
        x, y = leaves[0] * 1, leaves[1] * 1
        result = function(x, y)
        torch.autograd.backward([result, x], [torch.ones(2), torch.full((2,), 3.0)])
        gradients.append([leaf.grad for leaf in leaves])
    for theirs, mine in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_copies_between_devices_are_not_recomputed() -> None:
    """A copy to the CPU blocks, so its result is saved. Constants are recomputed instead of saved."""

    def joint(primals: torch.Tensor, tangents: torch.Tensor) -> list[torch.Tensor]:
        mask = to_device(torch.ones(3, 3).triu(), "cuda:0")
        here = to_device((primals * mask).sin(), "cpu")
        gradient = to_device(tangents * here.exp(), "cuda:0")
        return [here.exp(), gradient * primals.cos() * mask]

    module = traced(joint, torch.randn(3, 3), torch.randn(3, 3), on=[CUDA, CPU])
    forward, backward = partition(module, (), platform="cuda", num_fwd_outputs=1)
    assert names(forward.graph).count("sin") == 1
    assert "sin" not in names(backward.graph)
    to_cpu = [node for node in backward.graph.nodes if node.kwargs.get("device") == CPU]
    assert not to_cpu
    assert "ones" in names(backward.graph)
    assert all(node.kwargs["device"] == CUDA for node in backward.graph.nodes if "device" in node.kwargs)
