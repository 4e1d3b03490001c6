"""Custom ops, and their lowerings, for fused optimizer steps (`fused=True`) with settings, such as weight decay, that are tensors.

torch's own ops for such steps cannot be traced, and take only the learning rate as a tensor. Their decompositions are long graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from jax import Array

from ..registry import lowers
from . import optimizers

Tensors = Sequence[torch.Tensor]


def _run_on_copies(
    op: Callable[..., Any], lists: Sequence[Tensors], mutated: int, numbers: Tensors, names: Sequence[str], **settings: Any
) -> list[torch.Tensor]:
    """Runs torch's in-place optimizer step on copies of its tensors. Returns the updated tensors, as one list.

    Args:
        op: torch's op, which writes to the first `mutated` lists.
        lists: The op's lists of tensors.
        mutated: The number of lists that are copied and returned.
        numbers: The settings that are tensors of rank 0.
        names: The names of the settings that are tensors.
        settings: The op's other arguments. The value of a tensor in `numbers` replaces the argument of its name.
    """
    settings |= {name: number.item() for name, number in zip(names, numbers, strict=True)}
    copies = [[tensor.clone() for tensor in tensors] for tensors in lists[:mutated]]
    op(*copies, *map(list, lists[mutated:]), **settings)
    return [tensor for tensors in copies for tensor in tensors]


def _empty_like(*lists: Tensors) -> list[torch.Tensor]:
    return [torch.empty_like(tensor) for tensors in lists for tensor in tensors]


# Part of both schemas. `numbers` are the settings that are tensors of rank 0, and `names` their names. The float arguments with these names
# are ignored.
_NUMBERS = "Tensor[] numbers, Tensor? grad_scale, Tensor? found_inf, *, str[] names"


@torch.library.custom_op(
    "dynaxla::fused_adam",
    mutates_args=(),
    schema=(
        "(Tensor[] params, Tensor[] grads, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor[] max_exp_avg_sqs, Tensor[] state_steps, "
        f"{_NUMBERS}, float lr, float beta1, float beta2, float weight_decay, float eps, bool amsgrad, bool maximize, bool decoupled) "
        "-> Tensor[]"
    ),
)
def fused_adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    max_exp_avg_sqs: Tensors,
    state_steps: Tensors,
    numbers: Tensors,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    *,
    names: Sequence[str],
    decoupled: bool,
    **settings: Any,
) -> list[torch.Tensor]:
    """Returns the new parameters, unscaled gradients, and states (not state_steps), as one list. decoupled: True for AdamW."""
    lists = params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, state_steps
    step = torch._fused_adamw_ if decoupled else torch._fused_adam_
    return _run_on_copies(step, lists, 5, numbers, names, grad_scale=grad_scale, found_inf=found_inf, **settings)


@fused_adam.register_fake
def _(
    params: Tensors, grads: Tensors, exp_avgs: Tensors, exp_avg_sqs: Tensors, max_exp_avg_sqs: Tensors, *_: Any, **__: Any
) -> list[torch.Tensor]:
    return _empty_like(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs)


@lowers(torch.ops.dynaxla.fused_adam.default)
def _lower_adam(*arguments: Any, decoupled: bool, **settings: Any) -> list[Array]:
    return _lower(optimizers.adam(decoupled), *arguments, **settings)


@torch.library.custom_op(
    "dynaxla::fused_sgd",
    mutates_args=(),
    schema=(
        f"(Tensor[] params, Tensor[] grads, Tensor[] momentum_buffer_list, {_NUMBERS}, float lr, float weight_decay, float momentum, "
        "float dampening, bool nesterov, bool maximize, bool is_first_step) -> Tensor[]"
    ),
)
def fused_sgd(
    params: Tensors,
    grads: Tensors,
    momentum_buffer_list: Tensors,
    numbers: Tensors,
    grad_scale: torch.Tensor | None,
    found_inf: torch.Tensor | None,
    *,
    names: Sequence[str],
    **settings: Any,
) -> list[torch.Tensor]:
    """Returns the new parameters, unscaled gradients, and momentum buffers, as one list."""
    lists = params, grads, momentum_buffer_list
    return _run_on_copies(torch._fused_sgd_, lists, 3, numbers, names, grad_scale=grad_scale, found_inf=found_inf, **settings)


@fused_sgd.register_fake
def _(params: Tensors, grads: Tensors, momentum_buffer_list: Tensors, *_: Any, **__: Any) -> list[torch.Tensor]:
    return _empty_like(params, grads, momentum_buffer_list)


@lowers(torch.ops.dynaxla.fused_sgd.default)
def _lower_sgd(*arguments: Any, **settings: Any) -> list[Array]:
    return _lower(optimizers.fused_sgd, *arguments, **settings)


def _lower(
    lowering: Callable[..., Sequence[Sequence[Array]]],
    *arguments: Any,
    names: Sequence[str],
    **settings: Any,
) -> list[Array]:
    """Returns the results of a lowering such as `optimizers.fused_sgd`, with its lists concatenated into one."""
    *lists, numbers, grad_scale, found_inf = arguments
    settings |= dict(zip(names, numbers, strict=True))
    results = lowering(*lists, grad_scale=grad_scale, found_inf=found_inf, **settings)
    return [array for arrays in results for array in arrays]
