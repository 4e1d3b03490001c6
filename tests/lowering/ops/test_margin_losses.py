"""Margin losses over classes, and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.gradients import check_gradients
from support.comparisons.single_op import check_op

aten = torch.ops.aten


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_multi_margin_loss(reduction: str) -> None:
    def function(x, target, weight):
        return (
            F.multi_margin_loss(x, target, reduction=reduction),
            F.multi_margin_loss(x, target, p=2, margin=0.5, weight=weight, reduction=reduction),
            # torch's shape propagation returns another shape than eager mode
            *([F.multi_margin_loss(x[0], target[0], reduction=reduction)] if reduction != "none" else []),
        )

    check_gradients(function, torch.randn(4, 3), constants=[torch.tensor([0, 2, 1, 2]), torch.rand(3)])


@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_multilabel_margin_loss(reduction: int) -> None:
    """Tests the ops: in training, torch decomposes the loss before a backend sees it, wrongly for targets after a -1."""
    x = torch.randn(4, 4)
    target = torch.tensor([[3, 0, -1, 1], [-1, 2, 2, 2], [0, 1, 2, 3], [1, -1, -1, -1]])
    check_op(aten.multilabel_margin_loss_forward.default, x, target, reduction)
    loss, is_target = aten.multilabel_margin_loss_forward(x.double(), target, reduction)
    grad = torch.randn(loss.shape, dtype=loss.dtype)
    check_op(aten.multilabel_margin_loss_backward.default, grad, x.double(), target, reduction, is_target)
    if reduction:
        check_op(aten.multilabel_margin_loss_forward.default, x[0], target[0], reduction)
        check_op(aten.multilabel_margin_loss_backward.default, grad.float(), x[0], target[0], reduction, is_target[0].float())
