"""Tests of functions with tensors on the CPU and a GPU, or on two GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.comparisons.compare import assert_equal

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a CUDA build of torch"),
]

INDICES = torch.tensor([2, 0])


def written(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return x + a.to("cuda")


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "solve": lambda x, a: torch.linalg.solve(x, x[[0, 1, 3, 2]]),
    "index": lambda x, a: x[INDICES],
    "known": lambda x, a: x + torch.arange(4).to("cuda") + torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda"),
    "mask": lambda x, a: x.masked_fill(torch.triu(torch.ones(4, 4), 1).bool().to(x.device), -1.0),
    "input": lambda x, a: (x @ a.to("cuda", non_blocking=True), a, a[1:]),
    "output": lambda x, a: (x.sum(0).cpu(), x.exp().to("cpu", non_blocking=True)),
    "middle": lambda x, a: (x.sum(0).cpu() * a).to("cuda") + x,
    "copied into": lambda x, a: x.clone().copy_(a),
    "written": written,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    compiled = torch.compile(FUNCTIONS[name], backend="dynaxla", fullgraph=True)
    for _ in range(3):
        x, a = torch.randn(4, 4, device="cuda") + 4 * torch.eye(4, device="cuda"), torch.randn(4, 4)
        mine, theirs = ([x.clone().requires_grad_(), a.clone()] for _ in range(2))
        results, expected = compiled(*mine), FUNCTIONS[name](*theirs)
        for outputs in (results, expected):
            leaves = torch.utils._pytree.tree_leaves(outputs)
            sum(leaf.cpu().square().sum() for leaf in leaves if leaf.requires_grad).backward()
        assert_equal(results, expected, tolerance=(1e-4, 1e-4))
        assert_equal(mine[1], theirs[1])
        assert_equal(mine[0].grad, theirs[0].grad, tolerance=(1e-3, 1e-3))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_gpu_and_two_gpus() -> None:
    """The current device is the first GPU."""
    layer = torch.nn.Linear(8, 8, device="cuda:1")
    x = torch.randn(4, 8, device="cuda:1")
    compiled = torch.compile(layer, backend="dynaxla", fullgraph=True)
    assert_equal(compiled(x), layer(x), tolerance=(1e-4, 1e-4))
    both = torch.compile(lambda x: (x.to("cuda:0").sin(), x.cos()), backend="dynaxla", fullgraph=True)
    assert [result.device.index for result in both(x)] == [0, 1]
    assert_equal(both(x), (x.to("cuda:0").sin(), x.cos()), tolerance=(1e-4, 1e-4))
