"""The ops for optimizers' fused steps: their lowerings against torch's own kernels, which compute them in eager mode."""

from __future__ import annotations

import pytest
import torch
from single_op import check_op

import dynaxla.lowering.ops.fused_optimizers  # noqa: F401  (it defines the ops)


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["adam", "adamw"])
def test_adam(decoupled: bool, amsgrad: bool, scaled: bool) -> None:
    torch.manual_seed(0)
    params, grads, means = [[torch.randn(4, 3), torch.randn(5)] for _ in range(3)]
    squares = [torch.zeros(4, 3), torch.rand(5)]
    steps = [torch.tensor(3.0), torch.tensor(1.0)]
    scale = [torch.tensor(8.0), torch.tensor(0.0)] if scaled else [None, None]
    settings = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-8, "maximize": scaled, "amsgrad": amsgrad}
    largest = [square + 0.1 for square in squares] if amsgrad else []
    for rate in (0.0, 0.01):
        lists = params, grads, means, squares, largest, steps
        lr = torch.tensor(rate, dtype=torch.float64)
        check_op(torch.ops.dynaxla.fused_adam.default, *lists, lr, *scale, **settings, decoupled=decoupled)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["", "momentum"])
@pytest.mark.parametrize("first", [False, True], ids=["", "first"])
def test_sgd(first: bool, momentum: float, scaled: bool) -> None:
    torch.manual_seed(0)
    params, grads, buffers = [[torch.randn(4, 3), torch.randn(5)] for _ in range(3)]
    scale = [torch.tensor(8.0), torch.tensor(0.0)] if scaled else [None, None]
    lists = params, grads, buffers if momentum else []
    lr = torch.tensor(0.01, dtype=torch.float64)
    settings = {"momentum": momentum, "weight_decay": 0.1, "dampening": 0.0 if scaled else 0.3, "nesterov": scaled, "maximize": scaled}
    check_op(torch.ops.dynaxla.fused_sgd.default, *lists, lr, *scale, **settings, is_first_step=first)
