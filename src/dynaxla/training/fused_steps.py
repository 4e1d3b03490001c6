"""Fused optimizer steps in a recorded graph. Each step is one node, whether its settings are Python numbers or tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..lowering.ops import fused_optimizers as fused_optimizers  # defines torch.ops.dynaxla.fused_*
from ..torch_ops import aten

Tensors = Sequence[torch.Tensor]


class FusedStep:
    """A callable with the arguments and the writes of one of torch's fused optimizer steps.

    A number among the arguments, such as the learning rate, may also be a float64 tensor of rank 0.

    Attributes:
        op: torch's op, which writes in place.
        written_lists: the number of argument lists that the op's schema declares as written: parameters, gradients, and each state.
        supports_half: True if torch's op gives correct results for half types, too.
    """

    def __init__(
        self, op: torch._ops.OpOverload, functional: torch._ops.OpOverload, *, supports_half: bool = True, **settings: Any
    ) -> None:
        self.op = op
        self.supports_half = supports_half
        self.written_lists = sum(argument.alias_info is not None for argument in op._schema.arguments)
        self._functional = functional
        self._settings = settings
        self.__name__ = op._schema.name.partition("::")[2]

    def __call__(
        self,
        *lists: Tensors,
        grad_scale: torch.Tensor | None = None,
        found_inf: torch.Tensor | None = None,
        **settings: Any,
    ) -> None:
        numbers = {name: value for name, value in settings.items() if isinstance(value, torch.Tensor)}
        if not numbers:
            self.op(*lists, grad_scale=grad_scale, found_inf=found_inf, **settings)
            return
        settings |= self._settings | dict.fromkeys(numbers, 1.0)  # the functional op takes these numbers from its list of tensors
        new = self._functional(*lists, list(numbers.values()), grad_scale, found_inf, names=list(numbers), **settings)
        params, grads, *states = lists[: self.written_lists]
        pairs = list(zip([tensor for tensors in (params, grads, *states) for tensor in tensors], new, strict=True))
        for old, value in pairs if grad_scale is not None else pairs[: len(params)] + pairs[len(params) + len(grads) :]:
            old.copy_(value)


_STEPS = [
    FusedStep(aten._fused_adam_.default, torch.ops.dynaxla.fused_adam.default, decoupled=False),
    FusedStep(aten._fused_adamw_.default, torch.ops.dynaxla.fused_adam.default, decoupled=True),
    # torch 2.13's CPU kernel has errors of 0.1 and more for 48 or more elements of bfloat16 or float16; for 8 elements it is correct.
    FusedStep(aten._fused_sgd_.default, torch.ops.dynaxla.fused_sgd.default, supports_half=False),
]


def fused_step(op: torch._ops.OpOverload) -> FusedStep | None:
    """Returns the `FusedStep` that replaces one of torch's fused steps in a recording; None for other ops."""
    return next((step for step in _STEPS if op._schema.name == step.op._schema.name), None)
