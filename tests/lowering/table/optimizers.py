"""Fused steps of optimizers, and gradient scaling."""

from typing import Any

import torch

import dynaxla.lowering.ops.fused_optimizers  # noqa: F401  (defines two of the ops)
from lowering.table.rows import Keywords, Make, Op, Samples, aten

ADAM = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-6}
SGD = {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.1, "maximize": False, "nesterov": True, "is_first_step": False}
ADAGRAD = {"lr_decay": 0.1, "weight_decay": 0.1, "eps": 1e-6, "maximize": True}


def lists(make: Make, n: int, count: int) -> list[list[torch.Tensor]]:
    """`count` lists (parameters, gradients, states) of two tensors of different dtypes."""
    return [[make(n, 3), make(3).double()] for _ in range(count)]


def counts() -> list[torch.Tensor]:
    """The numbers of steps."""
    return [torch.tensor(1.0), torch.tensor(7.0)]


def scaling(found_inf: float) -> dict[str, torch.Tensor]:
    return {"grad_scale": torch.tensor(4.0), "found_inf": torch.tensor(found_inf)}


def adam(**more: Any) -> Samples:
    plain = {**ADAM, "weight_decay": 0.0, "amsgrad": False, "maximize": False, **more}
    full = {**ADAM, "weight_decay": 0.1, "amsgrad": True, "maximize": True, **more}
    return lambda make, n: [
        (*lists(make, n, 4), [], counts(), Keywords(plain)),
        *((*lists(make, n, 5), counts(), Keywords(full, **scaling(found_inf))) for found_inf in (0.0, 1.0)),
    ]


def sgd(**more: Any) -> Samples:
    plain = {**SGD, "momentum": 0.0, "nesterov": False, **more}
    first = {**SGD, "nesterov": False, "is_first_step": True, **more}
    return lambda make, n: [
        (*lists(make, n, 2), [], Keywords(plain)),
        (*lists(make, n, 3), Keywords(first, **scaling(0.0))),
        (*lists(make, n, 3), Keywords({**SGD, "nesterov": False}, **more)),
        (*lists(make, n, 3), Keywords({**SGD, "dampening": 0.0}, **more)),
    ]


def adagrad(**more: Any) -> Samples:
    return lambda make, n: [(*lists(make, n, 3), counts(), Keywords(ADAGRAD, **scaling(0.0), **more))]


def recorded_adam(make: Make, n: int) -> list[tuple[Any, ...]]:
    """Samples of a recorded step, in which the learning rate is a tensor."""
    plain = {**ADAM, "lr": 1.0, "weight_decay": 0.1, "amsgrad": False, "maximize": False, "names": ["lr"]}
    return [(*lists(make, n, 4), [], counts(), [RATE64], None, None, Keywords(plain, decoupled=decoupled)) for decoupled in (False, True)]


def recorded_sgd(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [(*lists(make, n, 3), [RATE64], None, None, Keywords(SGD, lr=1.0, names=["lr"]))]


RATE64 = torch.tensor(0.05, dtype=torch.float64)
RATE = {"lr": torch.tensor(0.05)}
# torch's CPU kernels ignore strides, and read contiguous memory.
WITHOUT_GAPS = ("with gaps",)
# torch has no shape propagation for most of these ops.
WITHOUT_SIZES = (*WITHOUT_GAPS, "changing sizes")

ROWS: list[Op] = [
    *(
        Op(op, samples, (torch.float32,), low=0.1, gradient=False, without=WITHOUT_GAPS)
        for op, samples in (
            (aten._fused_adam.default, adam(lr=0.05)),
            (aten._fused_adamw.default, adam(lr=0.05)),
            (torch.ops.dynaxla.fused_adam.default, recorded_adam),
            (torch.ops.dynaxla.fused_sgd.default, recorded_sgd),
        )
    ),
    *(
        Op(op, samples, (torch.float32,), low=0.1, gradient=False, without=WITHOUT_SIZES)
        for op, samples in (
            (aten._fused_adam.tensor_lr, adam(**RATE)),
            (aten._fused_adamw.tensor_lr, adam(**RATE)),
            (aten._fused_sgd.default, sgd(lr=0.05)),
            (aten._fused_sgd.tensor_lr, sgd(**RATE)),
            (aten._fused_adagrad.default, adagrad(lr=0.05)),
            (aten._fused_adagrad.tensor_lr, adagrad(**RATE)),
        )
    ),
    Op(aten._amp_foreach_non_finite_check_and_unscale.default, lambda make, n: [
        ([make(n, 3), make(3)], torch.zeros(1), torch.tensor([0.25]))
    ], (torch.float32,), gradient=False),
    Op(aten._amp_update_scale.default, lambda make, n: [
        (torch.tensor(8.0), torch.tensor(count, dtype=torch.int32), torch.tensor(found_inf), 2.0, 0.5, 3)
        for count, found_inf in ((0, 0.0), (2, 0.0), (1, 1.0))
    ], (torch.float32,), gradient=False),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {}
