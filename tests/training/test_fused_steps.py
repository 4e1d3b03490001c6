"""Tests of training/fused_steps.py: the fused optimizer step of a recording writes the same as torch's op."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from dynaxla.training.fused_steps import fused_step
from support.comparisons.compare import assert_equal

aten = torch.ops.aten
ADAM: dict[str, Any] = {"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1, "eps": 1e-6, "amsgrad": False, "maximize": False}
SGD: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.0, "nesterov": True, "maximize": False, "is_first_step": False}


def lists(count: int) -> list[list[torch.Tensor]]:
    return [[torch.rand(3, 4), torch.rand(2)] for _ in range(count)]


@pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
@pytest.mark.parametrize("lr", [0.05, torch.tensor(0.05, dtype=torch.float64)], ids=["number", "tensor"])
def test_fused_step_equals_torchs_op(lr: float | torch.Tensor, scaled: bool) -> None:
    """With a gradient scale, the ops also write the unscaled gradients."""
    scaling = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)} if scaled else {}
    steps = [torch.tensor(3.0), torch.tensor(3.0)]
    for op, args, settings in (
        (aten._fused_adam_.default, [*lists(4), [], steps], ADAM),
        (aten._fused_adamw_.default, [*lists(4), [], steps], ADAM),
        (aten._fused_sgd_.default, lists(3), SGD),
    ):
        mine, theirs = copy.deepcopy(args), copy.deepcopy(args)
        step = fused_step(op)
        assert step is not None
        step(*mine, lr=lr, **settings, **scaling)
        op(*theirs, lr=0.05, **settings, **scaling)
        assert_equal(mine, theirs)
        assert not torch.equal(mine[0][0], args[0][0])
        assert torch.equal(mine[1][0], args[1][0]) != scaled


def test_other_ops_have_no_fused_step() -> None:
    assert fused_step(aten.add_.Tensor) is None
    assert fused_step(aten._fused_adagrad_.default) is None
