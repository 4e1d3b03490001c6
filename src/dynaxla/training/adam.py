"""Adam's fused step for a learning rate that is a tensor, of ATen's elementwise ops: torch's own op for that cannot be traced."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Tensors = Sequence[torch.Tensor]


def fused_adam(*, decoupled: bool) -> Callable[..., None]:
    """Arguments as for `torch._fused_adam_`, but lr is a float64 tensor of rank 0. Half types are computed in float32.

    decoupled: whether the weight decay is AdamW's.
    """

    def step_all(
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        max_exp_avg_sqs: Tensors,
        state_steps: Tensors,
        *,
        lr: torch.Tensor,
        beta1: float,
        beta2: float,
        weight_decay: float,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
    ) -> None:
        for index, (param, grad, steps) in enumerate(zip(params, grads, state_steps, strict=True)):
            states = [exp_avgs[index], exp_avg_sqs[index], *([max_exp_avg_sqs[index]] if amsgrad else [])]
            wide, slope, mean, square, *most = map(_wide, [param, grad, *states])
            unscaled = slope if grad_scale is None else slope / grad_scale
            slope = -unscaled if maximize else unscaled
            if weight_decay and decoupled:
                wide = wide * (1 - lr * weight_decay).to(wide.dtype)
            elif weight_decay:
                slope = slope + wide * weight_decay
            mean = mean * beta1 + slope * (1 - beta1)
            square = square * beta2 + slope.square() * (1 - beta2)
            most = [torch.maximum(most[0], square)] if most else []
            count = steps.to(torch.float64)
            size = (lr / (1 - beta1**count)).to(wide.dtype)
            root = (1 - beta2**count).sqrt().to(wide.dtype)
            below = (most[0] if most else square).sqrt() / root + eps
            new = [wide - mean * size / below, mean, square, *most]
            if grad_scale is not None:
                new, states = [*new, unscaled], [*states, grad]
            for old, value in zip([param, *states], new, strict=True):
                value = value.to(old.dtype)
                old.copy_(value if found_inf is None else torch.where(found_inf == 1, old, value))

    return step_all


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
