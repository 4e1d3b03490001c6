"""Ops for the fused steps of optimizers, compared with torch's kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynaxla.lowering.ops.fused_optimizers  # noqa: F401  (defines the ops)
from support.comparisons.single_op import check_op


def take_tensor_settings(settings: dict[str, Any], names: list[str]) -> list[torch.Tensor]:
    """Returns the settings of these names as tensors. Sets their values in `settings` to a number, which the op ignores."""
    numbers = [torch.tensor(settings[name], dtype=torch.float64) for name in names]
    settings |= dict.fromkeys(names, 1.0)
    return numbers


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
    for rate, names in ((0.0, ["lr"]), (0.01, ["lr"]), (0.01, ["beta1", "weight_decay", "lr", "beta2"]), (0.01, [])):
        lists = params, grads, means, squares, largest, steps
        chosen = settings | {"lr": rate}
        numbers = take_tensor_settings(chosen, names)
        check_op(torch.ops.dynaxla.fused_adam.default, *lists, numbers, *scale, names=names, **chosen, decoupled=decoupled)


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("momentum", [0.0, 0.9], ids=["", "momentum"])
@pytest.mark.parametrize("first", [False, True], ids=["", "first"])
def test_sgd(first: bool, momentum: float, scaled: bool) -> None:
    torch.manual_seed(0)
    params, grads, buffers = [[torch.randn(4, 3), torch.randn(5)] for _ in range(3)]
    scale = [torch.tensor(8.0), torch.tensor(0.0)] if scaled else [None, None]
    lists = params, grads, buffers if momentum else []
    settings = {
        "lr": 0.01,
        "momentum": momentum,
        "weight_decay": 0.1,
        "dampening": 0.0 if scaled else 0.3,
        "nesterov": scaled,
        "maximize": scaled,
    }
    for names in (["lr"], ["weight_decay", "dampening", *(["momentum"] if momentum else [])]):
        chosen = dict(settings)
        numbers = take_tensor_settings(chosen, names)
        check_op(torch.ops.dynaxla.fused_sgd.default, *lists, numbers, *scale, names=names, **chosen, is_first_step=first)
