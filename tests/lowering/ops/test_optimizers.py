"""Fused steps of optimizers, and gradient scaling."""

from __future__ import annotations

from typing import Any

import torch
from compare import check

aten = torch.ops.aten
INF = float("inf")


def lists(count: int) -> list[list[torch.Tensor]]:
    """Tensors for parameters, gradients and states; squares are not negative."""
    return [[torch.rand(3, 4), torch.rand((), dtype=torch.float64)] for _ in range(count)]


def scaling(found_inf: float) -> dict[str, torch.Tensor]:
    return {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(found_inf)}


def test_fused_steps() -> None:
    params, grads, means, squares, most = lists(5)
    steps = [torch.tensor(1.0), torch.tensor(7.0)]

    def function(params, grads, means, squares, most, steps, lr, scaled, overflowed):
        results: list[Any] = []
        for op in (aten._fused_adam, aten._fused_adamw):
            shared = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6}
            plain = {**shared, "weight_decay": 0.0, "amsgrad": False, "maximize": False}
            full = {**shared, "weight_decay": 0.1, "amsgrad": True, "maximize": True}
            results += [
                op(params, grads, means, squares, [], steps, lr=0.05, **plain),
                op(params, grads, means, squares, most, steps, lr=0.05, **full, **scaled),
                op(params, grads, means, squares, most, steps, lr=0.05, **full, **overflowed),
                op.tensor_lr(params, grads, means, squares, most, steps, lr=lr, **full),
            ]
        shared = {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1, "maximize": False}
        sgd, adagrad = aten._fused_sgd, aten._fused_adagrad
        results += [
            sgd(params, grads, means, lr=0.05, **shared, nesterov=False, is_first_step=False),
            sgd(params, grads, means, lr=0.05, **shared, nesterov=False, is_first_step=True, **scaled),
            sgd(params, grads, [], lr=0.05, **{**shared, "momentum": 0.0}, nesterov=False, is_first_step=False),
            sgd.tensor_lr(params, grads, means, lr=lr, **{**shared, "dampening": 0.0}, nesterov=True, is_first_step=False),
        ]
        shared = {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-6, "maximize": True}
        results += [adagrad(params, grads, squares, steps, lr=0.05, **shared, **scaled)]
        results += [adagrad.tensor_lr(params, grads, squares, steps, lr=lr, **shared)] if hasattr(adagrad, "tensor_lr") else []
        return [[list(tensors) for tensors in result] for result in results]

    check(function, params, grads, means, squares, most, steps, torch.tensor(0.05), scaling(0.0), scaling(1.0), calls=1)


def test_gradient_scaling() -> None:
    def unscaled(grads, found_inf, inv_scale):
        out, found = aten._amp_foreach_non_finite_check_and_unscale(grads, found_inf, inv_scale)
        return list(out), found

    zero, factor = torch.zeros(1), torch.tensor([0.25])
    for value in (1.0, INF, float("nan")):
        check(unscaled, [torch.randn(3, 4), torch.tensor([value, 2.0])], zero, factor, calls=1)

    def updated(scale, tracker, found_inf):
        return aten._amp_update_scale(scale, tracker, found_inf, 2.0, 0.5, 3)

    for scale, tracker, found in ((8.0, 0, 0.0), (8.0, 2, 0.0), (3e38, 2, 0.0), (8.0, 1, 1.0)):
        check(updated, torch.tensor(scale), torch.tensor(tracker, dtype=torch.int32), torch.tensor(found), calls=1)
