"""Adam's fused step for a learning rate that is a tensor: torch's own op for that cannot be traced, and its parts make long graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jax import Array

from ..lowering.ops.optimizers import adam
from ..lowering.registry import lowers

Tensors = Sequence[torch.Tensor]

_SCHEMA = (
    "(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] max_exp_avg_sqs, Tensor[] state_steps, Tensor lr, "
    "Tensor? grad_scale, Tensor? found_inf, *, float beta1, float beta2, float weight_decay, float eps, bool amsgrad, bool maximize, "
    "bool decoupled) -> Tensor[]"
)


@torch.library.custom_op("dynaxla::fused_adam", mutates_args=(), schema=_SCHEMA)
def fused_adam_op(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    state_steps: Tensors,
    lr: torch.Tensor,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    *,
    decoupled: bool,
    **settings: Any,
) -> list[torch.Tensor]:
    """The new parameters, unscaled gradients, and states, one list after the other."""
    written = [[tensor.clone() for tensor in tensors] for tensors in (params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)]
    step = torch._fused_adamw_ if decoupled else torch._fused_adam_
    step(*written, list(state_steps), lr=lr, grad_scale=grad_scale, found_inf=found_inf, **settings)
    return [tensor for tensors in written for tensor in tensors]


@fused_adam_op.register_fake
def _(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, max_exp_avg_sqs: Tensors, *_: Any, **__: Any
) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensor in (*params, *grads, *exp_avgs, *exp_avg_sqs, *max_exp_avg_sqs)]


@lowers(torch.ops.dynaxla.fused_adam.default)
def _lowering(
    params: Sequence[Array],
    grads: Sequence[Array],
    exp_avgs: Sequence[Array],
    exp_avg_sqs: Sequence[Array],
    max_exp_avg_sqs: Sequence[Array],
    state_steps: Sequence[Array],
    lr: Array,
    grad_scale: Array | None,
    found_inf: Array | None,
    *,
    beta1: float,
    beta2: float,
    weight_decay: float,
    eps: float,
    amsgrad: bool,
    maximize: bool,
    decoupled: bool,
) -> list[Array]:
    lists = adam(decoupled=decoupled)(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        max_exp_avg_sqs,
        state_steps,
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=amsgrad,
        maximize=maximize,
        grad_scale=grad_scale,
        found_inf=found_inf,
    )
    return [array for arrays in lists for array in arrays]


def fused_adam(*, decoupled: bool) -> Callable[..., None]:
    """What takes `torch._fused_adam_`'s arguments, lr as a float64 tensor of rank 0, and writes what it writes.

    decoupled: whether the weight decay is AdamW's.
    """

    def step(
        *lists: Tensors,
        lr: torch.Tensor,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        **settings: Any,
    ) -> None:
        params, grads, *states, _ = lists
        count = len(params)
        new = torch.ops.dynaxla.fused_adam(*lists, lr, grad_scale, found_inf, decoupled=decoupled, **settings)
        pairs = list(zip([tensor for tensors in (params, grads, *states) for tensor in tensors], new, strict=True))
        for old, value in pairs if grad_scale is not None else pairs[:count] + pairs[2 * count :]:
            old.copy_(value)

    return step
