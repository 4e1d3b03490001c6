"""The op for Adam's step: its lowering against torch's own fused kernel, which computes it in eager mode."""

from __future__ import annotations

import pytest
import torch
from single_op import check_op

import dynaxla.training.adam  # noqa: F401


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("amsgrad", [False, True], ids=["", "amsgrad"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["adam", "adamw"])
def test_as_the_fused_kernel(decoupled: bool, amsgrad: bool, scaled: bool) -> None:
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
