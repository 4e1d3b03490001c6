"""Hooks: on saved tensors, on tensors, on accumulated gradients, on modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd import graph

from .table import case, t

Tensor = torch.Tensor


@case(lambda: (t(3, grad=True),), around=graph.save_on_cpu)
@case(lambda: (t(3, grad=True),), "dynamic", around=graph.save_on_cpu, dynamic=True)
def saved_on_the_cpu(x: Tensor) -> Tensor:
    return x.sin().exp() * x


def doubled() -> Any:
    """The gradients differ from those without hooks."""
    return graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor)


def rounded() -> Any:
    return graph.saved_tensors_hooks(lambda tensor: tensor.to(torch.bfloat16), lambda tensor: tensor.float())


def to_numpy() -> Any:
    return graph.saved_tensors_hooks(lambda tensor: tensor.detach().numpy().copy(), torch.from_numpy)


@case(lambda: (t(3, grad=True),), "doubled", around=doubled)
@case(lambda: (t(3, grad=True),), "rounded", around=rounded)
@case(lambda: (t(3, grad=True),), "as NumPy arrays", around=to_numpy)
def packed_outside(x: Tensor) -> Tensor:
    return x * x.sin()


@case(lambda: (t(3, grad=True),), fullgraph=False)
def packed_inside(x: Tensor) -> Tensor:
    with graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor):
        return x * x.sin()


@case(lambda: (t(4, 3, grad=True), nn.Linear(3, 2)), around=graph.save_on_cpu)
def saved_parameters(x: Tensor, net: nn.Module) -> Tensor:
    return net(x).sin()


@case(lambda: (t(3, grad=True),), around=lambda: graph.disable_saved_tensors_hooks("none here"))
def hooks_disabled(x: Tensor) -> Tensor:
    return x.sin() * x


def triple(gradient: Tensor) -> Tensor:
    return gradient * 3


@case(lambda: (t(3, grad=True),))
def hook_on_an_intermediate(x: Tensor) -> Tensor:
    y = x.sin()
    y.register_hook(triple)
    return y * x


@case(lambda: (t(3, grad=True),))
def hook_on_an_input(x: Tensor) -> Tensor:
    x.register_hook(triple)
    return x.sin()


def hooked() -> tuple[Tensor]:
    x = t(3, grad=True)
    x.register_hook(triple)
    return (x,)


@case(hooked)
def hook_from_outside(x: Tensor) -> Tensor:
    return x.sin() * 2


def halve(tensor: Tensor) -> None:
    assert tensor.grad is not None
    tensor.grad.mul_(0.5)


def accumulated() -> tuple[Tensor]:
    x = t(3, grad=True)
    x.register_post_accumulate_grad_hook(halve)
    return (x,)


@case(accumulated)
def hook_on_the_accumulated_gradient(x: Tensor) -> Tensor:
    return x.sin() * 2


@case(lambda: (t(3, grad=True),))
def hook_on_a_result(x: Tensor) -> Tensor:
    y = x.sin() * 2
    y.register_hook(triple)
    return y


def with_module_hooks() -> tuple[Tensor, nn.Module]:
    net = nn.Linear(3, 3)
    net.register_forward_hook(lambda module, args, output: output * 2)
    net.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    return t(2, 3, grad=True), net


@case(with_module_hooks)
def hooks_of_a_module(x: Tensor, net: nn.Module) -> Tensor:
    return net(x)


def with_backward_hooks() -> tuple[Tensor, nn.Module]:
    net = nn.Linear(3, 3)
    net.register_full_backward_hook(lambda module, grads, outputs: (grads[0] * 2,))
    net.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 3,))
    return t(2, 3, grad=True), net


@case(with_backward_hooks, fullgraph=False)
def backward_hooks_of_a_module(x: Tensor, net: nn.Module) -> Tensor:
    return net(x).sin()


@case(lambda: (t(3, grad=True), t(3, grad=True)), fullgraph=False)
def hook_that_looks_at_another_tensor(x: Tensor, y: Tensor) -> Tensor:
    z = x * y
    z.register_hook(lambda gradient: gradient * y.detach())
    return z.sin()


@case(lambda: (t(3, grad=True),), fullgraph=False)
def retained_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    y.retain_grad()
    return y, y.sin()
