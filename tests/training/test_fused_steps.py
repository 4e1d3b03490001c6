"""What stands for an optimizer's fused step in a recording writes what torch's own writes, whether the learning rate is a number or not."""

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
def test_a_step_writes_what_torchs_writes(lr: float | torch.Tensor, scaled: bool) -> None:
    """The unscaled gradients, too."""
    scaling = {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(0.0)} if scaled else {}
    steps = [torch.tensor(3.0), torch.tensor(3.0)]
    for op, given, settings in (
        (aten._fused_adam_.default, [*lists(4), [], steps], ADAM),
        (aten._fused_adamw_.default, [*lists(4), [], steps], ADAM),
        (aten._fused_sgd_.default, lists(3), SGD),
    ):
        mine, theirs = copy.deepcopy(given), copy.deepcopy(given)
        step = fused_step(op)
        assert step is not None
        step(*mine, lr=lr, **settings, **scaling)
        op(*theirs, lr=0.05, **settings, **scaling)
        assert_equal(mine, theirs)
        assert not torch.equal(mine[0][0], given[0][0])
        assert torch.equal(mine[1][0], given[1][0]) != scaled


def test_other_ops_are_no_fused_steps() -> None:
    assert fused_step(aten.add_.Tensor) is None
    assert fused_step(aten._fused_adagrad_.default) is None
