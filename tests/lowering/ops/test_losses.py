"""Losses of probabilities and of distances."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.gradients import check_gradients


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_negative_log_likelihood(reduction: str) -> None:
    def function(x, target, weight):
        return (
            F.nll_loss(x, target, reduction=reduction),
            F.nll_loss(x, target, weight, ignore_index=2, reduction=reduction),
            F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=0.1),
            F.nll_loss(x[0], target[0], weight, reduction=reduction),
        )

    weight = torch.rand(4)
    check_gradients(function, torch.randn(3, 4), constants=[torch.tensor([1, 2, 0]), weight])

    def images(x, target, weight):
        return (
            F.nll_loss(x, target, reduction=reduction),
            F.nll_loss(x, target, weight, ignore_index=2, reduction=reduction),
            F.cross_entropy(x, target, reduction=reduction),
        )

    check_gradients(images, torch.randn(3, 4, 5, 6), constants=[torch.randint(4, (3, 5, 6)), weight])


def test_all_targets_ignored() -> None:
    def function(x, target):
        return F.cross_entropy(x, target), F.cross_entropy(x, target, reduction="sum"), F.cross_entropy(x[0], target[0])

    check_gradients(function, torch.randn(3, 4), constants=[torch.full((3,), -100)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_cross_entropy_dtypes(dtype: torch.dtype) -> None:
    tolerance = (3e-2, 3e-2) if dtype == torch.bfloat16 else None
    check_gradients(F.cross_entropy, torch.randn(5, 7).to(dtype), constants=[torch.randint(7, (5,))], tolerance=tolerance)


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_other_losses(reduction: str) -> None:
    def function(x, y):
        p, q = x.sigmoid(), y.sigmoid()
        return (
            F.mse_loss(x, y, reduction=reduction),
            F.l1_loss(x, y, reduction=reduction),
            F.smooth_l1_loss(x, y, reduction=reduction, beta=0.5),
            F.huber_loss(x, y, reduction=reduction, delta=0.7),
            F.binary_cross_entropy(p, q.detach(), reduction=reduction),
            F.binary_cross_entropy_with_logits(x, q.detach(), reduction=reduction),
            F.kl_div(x.log_softmax(1), q.detach(), reduction="batchmean" if reduction == "mean" else reduction),
            F.soft_margin_loss(x, y.detach().sign(), reduction=reduction),
        )

    check_gradients(function, torch.randn(3, 4), torch.randn(3, 4))
