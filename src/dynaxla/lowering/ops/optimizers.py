"""Lowerings of the optimizers' fused steps, and of the ops of torch.amp.GradScaler. Half types are computed in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import Array, lax

from ...torch_ops import aten
from ..context import Context
from ..promotion import broadcast_like, convert, full_like, to_accumulator
from ..registry import lowers

Tensors = Sequence[Array]
# Maps a parameter, its gradient, its states and, if used, the step count, all in the accumulator's dtype, to the new parameter and states.
Step = Callable[..., tuple[Array, ...]]


def _times(x: Array, factor: Any) -> Array:
    return lax.mul(x, broadcast_like(factor, x))


def _plus(x: Array, term: Any) -> Array:
    return lax.add(x, broadcast_like(term, x))


def _apply_step(
    params: Tensors,
    grads: Tensors,
    states: Sequence[Tensors],
    steps: Tensors | None,
    step: Step,
    maximize: bool,
    grad_scale: Array | None,
    found_inf: Array | None,
) -> tuple[list[Array], ...]:
    """Applies `step` to each parameter. Returns lists of new parameters, unscaled gradients, and new states.

    If found_inf is 1, the step is skipped: all results are the old values.

    Args:
        params: The parameters.
        grads: A gradient for each parameter.
        states: Lists of states, each with one tensor for each parameter.
        steps: The number of steps for each parameter, this step included, or None if `step` does not use it.
        step: The step of one parameter. It takes the number of steps (rank 0) as its last argument unless `steps` is None.
        maximize: True to pass negated gradients to `step`.
        grad_scale: The factor by which the gradients were scaled, or None.
        found_inf: 1 if a gradient was infinite or NaN. With None, the step is never skipped.
    """
    is_skipped = None if found_inf is None else lax.reshape(lax.eq(found_inf, full_like(found_inf, 1)), ())
    out: tuple[list[Array], ...] = tuple([] for _ in range(2 + len(states)))
    for index, (param, grad) in enumerate(zip(params, grads, strict=True)):
        wide_grad = to_accumulator(grad)
        if grad_scale is not None:
            wide_grad = lax.div(wide_grad, broadcast_like(grad_scale, wide_grad))
        old = [param, grad, *(state[index] for state in states)]
        step_count = [] if steps is None else [lax.reshape(convert(steps[index], wide_grad.dtype), ())]
        new_param, *new_states = step(
            to_accumulator(param), lax.neg(wide_grad) if maximize else wide_grad, *map(to_accumulator, old[2:]), *step_count
        )
        new = [new_param, wide_grad, *new_states]
        results = [convert(value, old_value.dtype) for value, old_value in zip(new, old, strict=True)]
        if is_skipped is not None:
            results = [lax.select(is_skipped, old_value, value) for value, old_value in zip(results, old, strict=True)]
        for outputs, value in zip(out, results, strict=True):
            outputs.append(value)
    return out


def _may_be_nonzero(value: Any) -> bool:
    """True for a number other than 0, and for a tensor."""
    return isinstance(value, Array) or value != 0


def _bias_correction(beta: Any, count: Array) -> Array:
    """Returns 1 - beta ** count.

    torch computes the correction in float64, which a TPU emulates, in 1,447 instructions for a power. Here it is computed in the dtype of
    `count`. In float32, a power subtracted from 1 would lose digits. With expm1 the relative error is at most 3.6e-7 for any count.
    """
    if not _may_be_nonzero(beta):
        return full_like(count, 1)
    log = lax.log1p(broadcast_like(beta - 1, count)) if isinstance(beta, Array) else math.log(beta)
    return lax.neg(lax.expm1(_times(count, log)))


def adam(decoupled: bool) -> Callable[..., tuple[list[Array], ...]]:
    """Returns the lowering of Adam's fused step, which returns new parameters, unscaled gradients, and states, one list each.

    decoupled: True for the weight decay of AdamW.

    Shape:  each that of its operand.
    Dtype:  each that of its operand.
    """

    def lowering(
        params: Tensors,
        grads: Tensors,
        exp_avgs: Tensors,
        exp_avg_sqs: Tensors,
        max_exp_avg_sqs: Tensors,
        state_steps: Tensors,
        *,
        lr: Any,
        beta1: Any,
        beta2: Any,
        weight_decay: Any,
        eps: float,
        amsgrad: bool,
        maximize: bool,
        grad_scale: Array | None = None,
        found_inf: Array | None = None,
    ) -> tuple[list[Array], ...]:
        def step(param: Array, grad: Array, mean: Array, square: Array, *rest: Array) -> tuple[Array, ...]:
            *max_square, step_count = rest
            if _may_be_nonzero(weight_decay) and decoupled:
                param = lax.sub(param, lax.mul(param, _times(broadcast_like(lr, param), weight_decay)))
            elif _may_be_nonzero(weight_decay):
                grad = lax.add(grad, _times(param, weight_decay))
            mean = lax.add(_times(mean, beta1), _times(grad, 1 - beta1))
            square = lax.add(_times(square, beta2), _times(lax.square(grad), 1 - beta2))
            max_square = [lax.max(max_square[0], square)] if max_square else []
            step_size = lax.div(broadcast_like(lr, step_count), _bias_correction(beta1, step_count))
            correction_root = lax.sqrt(_bias_correction(beta2, step_count))
            denominator = _plus(lax.div(lax.sqrt(max_square[0] if max_square else square), broadcast_like(correction_root, square)), eps)
            return lax.sub(param, lax.div(_times(mean, step_size), denominator)), mean, square, *max_square

        states = [exp_avgs, exp_avg_sqs, *([max_exp_avg_sqs] if amsgrad else [])]
        out = _apply_step(params, grads, states, state_steps, step, maximize, grad_scale, found_inf)
        return out if amsgrad else (*out, list(max_exp_avg_sqs))

    return lowering


lowers(aten._fused_adam.default, aten._fused_adam.tensor_lr)(adam(decoupled=False))
lowers(aten._fused_adamw.default, aten._fused_adamw.tensor_lr)(adam(decoupled=True))


@lowers(aten._fused_sgd.default, aten._fused_sgd.tensor_lr)
def fused_sgd(
    params: Tensors,
    grads: Tensors,
    momentum_buffer_list: Tensors,
    *,
    weight_decay: Any,
    momentum: Any,
    lr: Any,
    dampening: Any,
    nesterov: bool,
    maximize: bool,
    is_first_step: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
) -> tuple[list[Array], ...]:
    """The fused step of SGD: new parameters, unscaled gradients, and momentum buffers, one list each.

    Shape:  each that of its operand.
    Dtype:  each that of its operand.
    """

    def step(param: Array, grad: Array, *buffers: Array) -> tuple[Array, ...]:
        if _may_be_nonzero(weight_decay):
            grad = lax.add(grad, _times(param, weight_decay))
        if has_momentum:
            buffer = grad if is_first_step else lax.add(_times(buffers[0], momentum), _times(grad, 1 - dampening))
            grad = lax.add(grad, _times(buffer, momentum)) if nesterov else buffer
            buffers = (buffer,)
        return lax.sub(param, _times(grad, lr)), *buffers

    has_momentum = _may_be_nonzero(momentum)
    states = [momentum_buffer_list] if has_momentum else []
    out = _apply_step(params, grads, states, None, step, maximize, grad_scale, found_inf)
    return out if has_momentum else (*out, list(momentum_buffer_list))


@lowers(aten._fused_adagrad.default, aten._fused_adagrad.tensor_lr)
def fused_adagrad(
    params: Tensors,
    grads: Tensors,
    state_sums: Tensors,
    state_steps: Tensors,
    *,
    lr: Any,
    lr_decay: float,
    weight_decay: float,
    eps: float,
    maximize: bool,
    grad_scale: Array | None = None,
    found_inf: Array | None = None,
    ctx: Context,
) -> tuple[list[Array], ...]:
    """The fused step of Adagrad: new parameters, unscaled gradients, and sums of squares, one list each.

    The overload with `lr` as a number also returns the unchanged steps.

    Shape:  each that of its operand.
    Dtype:  each that of its operand.
    """

    def step(param: Array, grad: Array, square_sum: Array, step_count: Array) -> tuple[Array, ...]:
        if weight_decay:
            grad = lax.add(grad, _times(param, weight_decay))
        square_sum = lax.add(square_sum, lax.square(grad))
        step_size = lax.div(broadcast_like(lr, step_count), _plus(_times(_plus(step_count, -1), lr_decay), 1))
        return lax.sub(param, lax.div(_times(grad, step_size), _plus(lax.sqrt(square_sum), eps))), square_sum

    out = _apply_step(params, grads, [state_sums], state_steps, step, maximize, grad_scale, found_inf)
    return (*out, list(state_steps))[: len(ctx.node.target._schema.returns)]


# Gradient scaling


@lowers(aten._amp_foreach_non_finite_check_and_unscale.default)
def check_and_unscale(grads: Tensors, found_inf: Array, inv_scale: Array) -> tuple[list[Array], Array]:
    """The gradients times inv_scale; and found_inf, set to 1 if an element of a gradient is infinite or NaN.

    Dtype:  those of the gradients and of found_inf.
    """
    finite = [lax.reduce_and(lax.is_finite(grad), range(grad.ndim)) for grad in grads]
    for is_finite in finite:
        found_inf = lax.select(lax.broadcast_in_dim(is_finite, found_inf.shape, ()), found_inf, full_like(found_inf, 1))
    return [convert(_times(to_accumulator(grad), inv_scale), grad.dtype) for grad in grads], found_inf


@lowers(aten._amp_update_scale.default)
def update_scale(
    scale: Array,
    growth_tracker: Array,
    found_inf: Array,
    scale_growth_factor: float,
    scale_backoff_factor: float,
    growth_interval: int,
) -> tuple[Array, Array]:
    """The new scale, and the new number of successive steps without an infinite gradient.

    An infinite gradient reduces the scale. After `growth_interval` steps without an infinite gradient, the scale grows, unless it would
    become infinite. In both cases the number of steps becomes 0.

    Shape:  those of `scale` and `growth_tracker`.
    Dtype:  those of `scale` and `growth_tracker`.
    """
    is_overflow = lax.gt(lax.reshape(found_inf, scale.shape), full_like(scale, 0))
    count = _plus(growth_tracker, 1)
    is_growth_due = lax.reshape(lax.eq(count, full_like(count, growth_interval)), scale.shape)
    wide = convert(scale, np.dtype(np.float64))
    grown = convert(_times(wide, scale_growth_factor), scale.dtype)
    grown = lax.select(lax.bitwise_and(is_growth_due, lax.is_finite(grown)), grown, scale)
    new_scale = lax.select(is_overflow, convert(_times(wide, scale_backoff_factor), scale.dtype), grown)
    is_reset = lax.reshape(lax.bitwise_or(is_overflow, is_growth_due), growth_tracker.shape)
    return new_scale, lax.select(is_reset, full_like(count, 0), count)
