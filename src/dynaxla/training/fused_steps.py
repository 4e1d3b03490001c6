"""Fused optimizer steps in a recorded graph. Each fused step is one node, whether its settings are Python numbers or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..lowering.ops import fused_optimizers as fused_optimizers  # defines torch.ops.dynaxla.fused_*
from ..torch_ops import aten

Tensors = Sequence[torch.Tensor]


class FusedStep:
    """A callable that takes the arguments of one of torch's fused optimizer steps, and writes to the same tensors.

    A number among the arguments, such as the learning rate, may also be a float64 tensor of rank 0. If one is, the functional op of
    lowering/ops/fused_optimizers.py computes new values, which are copied to the tensors. Otherwise torch's op runs.

    Attributes:
        op: torch's op, which writes in place.
        written_list_count: the number of lists that the op's schema declares as written: the parameters, the gradients, and the states
            except the step counts.
        supports_half: True if torch's op gives correct results for half types, too.
    """

    def __init__(
        self, op: torch._ops.OpOverload, functional: torch._ops.OpOverload, *, supports_half: bool = True, **functional_settings: Any
    ) -> None:
        self.op = op
        self.supports_half = supports_half
        self.written_list_count = sum(argument.alias_info is not None for argument in op._schema.arguments)
        self._functional = functional
        self._functional_settings = functional_settings
        self.__name__ = op._schema.name.partition("::")[2]

    def __call__(
        self,
        *lists: Tensors,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        **settings: Any,
    ) -> None:
        tensor_settings = {name: value for name, value in settings.items() if isinstance(value, torch.Tensor)}
        if not tensor_settings:
            self.op(*lists, grad_scale=grad_scale, found_inf=found_inf, **settings)
            return
        # The functional op's schema needs a float for each setting. The op ignores this float and reads the tensor with the same name.
        settings |= self._functional_settings | dict.fromkeys(tensor_settings, 1.0)
        new = self._functional(*lists, list(tensor_settings.values()), grad_scale, found_inf, names=list(tensor_settings), **settings)
        params, grads, *states = lists[: self.written_list_count]
        pairs = list(zip([tensor for tensors in (params, grads, *states) for tensor in tensors], new, strict=True))
        if grad_scale is None:  # only a division by grad_scale changes gradients
            pairs = pairs[: len(params)] + pairs[len(params) + len(grads) :]
        for old, value in pairs:
            old.copy_(value)


_STEPS = [
    FusedStep(aten._fused_adam_.default, torch.ops.dynaxla.fused_adam.default, decoupled=False),
    FusedStep(aten._fused_adamw_.default, torch.ops.dynaxla.fused_adam.default, decoupled=True),
    # torch 2.13's CPU kernel of fused SGD has errors of 0.1 and more for 48 or more elements of bfloat16 or float16 (none for 8 elements).
    FusedStep(aten._fused_sgd_.default, torch.ops.dynaxla.fused_sgd.default, supports_half=False),
]


def fused_step(op: torch._ops.OpOverload) -> FusedStep | None:
    """Returns the `FusedStep` that replaces one of torch's fused steps in a recording; None for other ops."""
    return next((step for step in _STEPS if op._schema.name == step.op._schema.name), None)
