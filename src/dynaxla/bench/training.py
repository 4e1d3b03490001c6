"""Training steps as things to measure: a model with a loss and an optimizer, which an engine runs as it runs a model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree


class NoOptimizer(torch.optim.Optimizer):
    """For the forward and backward pass alone: its step does nothing."""

    def __init__(self, parameters: Iterable[torch.Tensor], fused: bool = False) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        pass


# The learning rate changes next to nothing: however often an engine has been called, its results are those of the first call and can be
# compared. It is not 0, by which Adam's step divides where torch compiles it: 0 / 0 for a parameter without a gradient.
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters, **options: torch.optim.SGD(parameters, lr=1e-12, **options),
    "adamw": lambda parameters, **options: torch.optim.AdamW(parameters, lr=1e-12, **options),
    "none": NoOptimizer,
}


class Training(nn.Module):
    """A call is one step (zero_grad, forward, backward, the optimizer), and returns the loss and the gradients of all parameters.

    The loss is the mean of the outputs' squares. Dropout is off: engines draw other masks, and their results could not be compared.

    Attributes: model (in training mode); optimizer (torch's fused one, unless an engine compiles its step; the device "jax" has none).
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

    def compiled(
        self,
        compile_model: Callable[[nn.Module], Callable[..., Any]],
        compile_step: Callable[[Callable[[], Any]], Callable[[], Any]] | None = None,
    ) -> Training:
        """The same training, of a copy of the model that is run as `compile_model` says; `compile_step`, if given, is for the optimizer."""
        mine = copy.deepcopy(self)
        mine._run = compile_model(mine.model)
        if compile_step is not None:
            mine.optimizer = self._new_optimizer(mine.model.parameters(), fused=False)
            mine._optimizer_step = compile_step(mine.optimizer.step)
        return mine

    def double(self) -> Training:
        """The optimizer's state is made anew: it would stay in the old dtype."""
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
