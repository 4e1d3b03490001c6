"""Training steps for the benchmark: modules with a model, a loss and an optimizer, which engines run like models."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class NoOptimizer(torch.optim.Optimizer):
    """An optimizer whose step does nothing, to measure the forward and backward pass alone."""

    def __init__(self, parameters: Iterable[torch.Tensor], fused: bool = False) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        pass


# The learning rate is so small that parameters hardly change: after any number of calls, an engine's results are those of the first call
# and can be compared. It is not 0, because the Adam step that torch compiles divides by it: 0 / 0 for a parameter without a gradient.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, **options: torch.optim.SGD(parameters, lr=1e-12, **options),
    "adamw": lambda parameters, **options: torch.optim.AdamW(parameters, lr=1e-12, **options),
    "none": NoOptimizer,
}


class TrainingStep(nn.Module):
    """A module whose call is one training step (zero_grad, forward, backward, the optimizer).

    A call returns the loss and the gradients of all parameters. The loss is the sum over outputs of their mean squares. Dropout is off,
    because engines draw different masks, and their results could not be compared.

    Attributes:
        model: the model, in training mode.
        optimizer: torch's fused optimizer; not fused if an engine compiles its step, or on the device "jax", which has no fused optimizers.
    """

    def __init__(self, model: nn.Module, optimizer: str) -> None:
        super().__init__()
        self.model = model.train().requires_grad_(True)
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        self._new_optimizer = OPTIMIZERS[optimizer]
        self.optimizer = self._fused_optimizer()
        self._run: Callable[..., Any] | None = None
        self._optimizer_step: Callable[[], Any] | None = None

    def with_compiled_model(
        self,
        compile_model: Callable[[nn.Module], Callable[..., Any]],
        compile_step: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None,
    ) -> TrainingStep:
        """Returns a copy of this step with a compiled copy of the model.

        Args:
            compile_model: compiles the model.
            compile_step: compiles the optimizer's step; None to leave it as it is.
        """
        copied = copy.deepcopy(self)
        copied._run = compile_model(copied.model)
        if compile_step is not None:
            copied.optimizer = self._new_optimizer(copied.model.parameters(), fused=False)
            copied._optimizer_step = compile_step(copied.optimizer.step)
        return copied

    def double(self) -> TrainingStep:
        """Converts the model to float64. The optimizer is new, because its state would keep the old dtype."""
        super().double()
        self.optimizer = self._fused_optimizer()
        return self

    def _fused_optimizer(self) -> torch.optim.Optimizer:
        parameters = list(self.model.parameters())
        return self._new_optimizer(parameters, fused=parameters[0].device.type != "jax")

    def step(self, *inputs: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        outputs = pytree.tree_leaves((self.model if self._run is None else self._run)(*inputs))
        loss = torch.stack([output.square().mean() for output in outputs]).sum()
        loss.backward()
        (self.optimizer.step if self._optimizer_step is None else self._optimizer_step)()
        return loss.detach()

    def gradients(self) -> list[torch.Tensor | None]:
        return [parameter.grad for parameter in self.model.parameters()]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        with torch.enable_grad():
            loss = self.step(*inputs)
        return loss, self.gradients()
