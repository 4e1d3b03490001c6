"""Gradients: regions without gradients, autocast, custom functions, higher orders, inputs with and without gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from .table import case, result, t

Tensor = torch.Tensor


@case(lambda: (t(3, grad=True), t(3, grad=True)))
def region_without_gradients(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        z = x * y
    return z, z * x


@case(lambda: (t(3, grad=True),), around=torch.no_grad)
def region_with_gradients(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x * 2


@case(lambda: (t(3, grad=True),))
def gradient_mode_set_and_restored(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    torch.set_grad_enabled(False)
    z = y * 2
    torch.set_grad_enabled(True)
    return y, z


@case(lambda: (t(3, grad=True), t(3, grad=True)))
def unused_input(x: Tensor, y: Tensor) -> Tensor:
    return x * 2


@case(lambda: (t(3, grad=True), t(3), torch.arange(3)))
def mixed_inputs(x: Tensor, y: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    return x[i] * y, i + 1, y + 1


@case(lambda: (t(4, 3, grad=True), nn.Linear(3, 2)))
@case(lambda: (t(4, 3), nn.Linear(3, 2)), "plain input")
@case(lambda: (t(4, 3, grad=True), nn.Linear(3, 2).requires_grad_(False)), "frozen weights")
@case(lambda: (t(4, 3, grad=True), nn.Linear(3, 2)), "dynamic", dynamic=True)
def module(x: Tensor, net: nn.Module) -> Tensor:
    return net(x).sin()


@case(lambda: (t(4, 3, grad=True), nn.Linear(3, 3)))
def same_module_twice(x: Tensor, net: nn.Module) -> Tensor:
    return net(net(x).relu())


@case(lambda: (t(4, 3, grad=True), nn.Linear(3, 2)), around=lambda: torch.autocast("cpu", torch.bfloat16))
def autocast_outside(x: Tensor, net: nn.Module) -> Tensor:
    return net(x).float()


@case(lambda: (t(4, 3, grad=True), nn.Linear(3, 2)))
def autocast_inside(x: Tensor, net: nn.Module) -> tuple[Tensor, Tensor]:
    with torch.autocast("cpu", torch.bfloat16):
        y = net(x)
        with torch.autocast("cpu", enabled=False):
            z = net(x)
    return y, z


@case(lambda: (t(3, grad=True),), order=2)
def second_derivative(x: Tensor) -> Tensor:
    return x.sin() * x


@case(lambda: (t(3, grad=True),), fullgraph=False)
def gradient_inside(x: Tensor) -> Tensor:
    y = (x * 2).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(y.square().sum(), y)
    return gradient * x


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        z = x * y
        ctx.mark_non_differentiable(mask := z > 0)
        return z, mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y * 10, grad * x


@case(lambda: (t(3, grad=True), t(3, grad=True)))
@case(lambda: (t(3, grad=True), t(3)), "one of two")
@case(lambda: (t(3, grad=True), t(3, grad=True)), "dynamic", dynamic=True)
def custom_function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return Double.apply(x.sin(), y)


class Partly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@case(lambda: (t(3, grad=True), t(3, grad=True)))
def custom_function_with_one_gradient(x: Tensor, y: Tensor) -> Tensor:
    return Partly.apply(x, y)


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


@case(lambda: (result(3),), fullgraph=False)
def custom_function_in_place(x: Tensor) -> Tensor:
    return InPlace.apply(x) + 1


@case(lambda: (t(3, grad=True),))
def gradient_that_is_expanded(x: Tensor) -> Tensor:
    return x.sum()


@case(lambda: (t(3, 4, grad=True),))
def gradient_through_copies(x: Tensor) -> Tensor:
    y = torch.zeros(3, 4)
    y[1:] = x[1:] * 2
    y[:, 0] = x[:, 1]
    return y


@case(lambda: (t(5, 3, grad=True), torch.tensor([0, 2, 2])))
def gradient_of_indices(x: Tensor, i: Tensor) -> Tensor:
    return x[i].sin() + x.gather(0, i.unsqueeze(1).expand(3, 3))


@case(lambda: (t(2, 3, 6, 6, grad=True), nn.Conv2d(3, 4, 3)))
def convolution_and_pooling(x: Tensor, net: nn.Module) -> Tensor:
    return F.max_pool2d(net(x).relu(), 2)


@case(lambda: (t(1, 2, 5, 4, grad=True),))
def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x.sin(), x.cos(), is_causal=True)


@case(lambda: (torch.tensor([1, 2, 2]), nn.Embedding(5, 3)))
@case(lambda: (torch.tensor([1, 2, 2]), nn.Embedding(5, 3, sparse=True)), "sparse")
@case(lambda: (torch.tensor([1, 2, 2]), nn.Embedding(5, 3, sparse=True)), "sparse and dynamic", dynamic=True)
@case(lambda: (torch.tensor([1, 2, 2]), nn.Embedding(5, 3, padding_idx=2, sparse=True)), "sparse with padding")
def embedding(i: Tensor, table: nn.Module) -> Tensor:
    return table(i) * 2


@case(lambda: (torch.tensor([1, 2, 2]), torch.tensor([0, 1]), nn.EmbeddingBag(5, 3, mode="sum")))
@case(lambda: (torch.tensor([1, 2, 2]), torch.tensor([0, 1]), nn.EmbeddingBag(5, 3, mode="sum", sparse=True)), "sparse")
def embedding_bag(i: Tensor, offsets: Tensor, table: nn.Module) -> Tensor:
    return table(i, offsets).sin()


@case(lambda: (torch.tensor([1, 2, 2]), nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)))
def sparse_and_dense_gradients(i: Tensor, table: nn.Module, net: nn.Module) -> Tensor:
    return net(table(i)).sin()


@case(lambda: (t(3, 4, grad=True), nn.Linear(4, 4)))
@case(lambda: (t(3, 4, grad=True), nn.Linear(4, 4)), "dynamic", dynamic=True)
def checkpointed(x: Tensor, net: nn.Module) -> Tensor:
    return checkpoint(lambda x: net(x).sin().cos(), x, use_reentrant=False)


@case(lambda: (t(3, 4, grad=True), nn.Linear(4, 4)), random=True)
def checkpointed_with_dropout(x: Tensor, net: nn.Module) -> Tensor:
    return checkpoint(lambda x: F.dropout(net(x).sin(), 0.5), x, use_reentrant=False)


@case(lambda: (t(3, 4, grad=True),))
def branch_on_a_tensor(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x * 3, (x,))


@case(lambda: (t(3, 3),))
def per_sample_gradients(x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: row.sin().sum()))(x)


@case(lambda: (t(3),))
def jacobian_and_tangent(x: Tensor) -> tuple[Tensor, Any]:
    return torch.func.jacrev(torch.sin)(x), torch.func.jvp(torch.cos, (x,), (torch.ones(3),))
