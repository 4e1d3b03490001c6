"""Writes to inputs in the forward pass, the backward pass or both, through views, with and without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .table import case, result, t

Tensor = torch.Tensor


@case(lambda: (t(3, 4),))
@case(lambda: (t(4, 3).t(),), "transposed")
@case(lambda: (t(3, 8)[:, ::2],), "strided")
@case(lambda: (result(3, 4),), "requires grad")
@case(lambda: (t(3, 4),), "dynamic", dynamic=True)
@case(lambda: (t(0, 4),), "empty")
@case(lambda: (t(),), "rank 0")
def add_in_place(x: Tensor) -> Tensor:
    x.add_(1)
    return x * 2


@case(lambda: (t(3, 4, grad=True),))
def refused_write_to_a_leaf(x: Tensor) -> Tensor:
    return x.add_(1) * 2


@case(lambda: (t(3, 4, grad=True),))
@case(lambda: (result(3, 4),), "result")
def write_without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        x.mul_(2)
    return x.sin()


@case(lambda: (t(3, 4, grad=True),))
@case(lambda: (result(3, 4),), "result")
def write_to_a_detached_input(x: Tensor) -> Tensor:
    x.detach().mul_(2)
    return x.sin()


@case(lambda: (t(3, 4, grad=True),))
def write_to_data(x: Tensor) -> Tensor:
    x.data.mul_(2)
    return x.sin()


@case(lambda: (result(3, 4), t(3, 4, grad=True)))
def input_becomes_differentiable(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(y)
    return x.sum()


@case(lambda: (t(3, 4), t(3, 4, grad=True)))
def plain_input_becomes_differentiable(x: Tensor, y: Tensor) -> Tensor:
    x.copy_(y * 2)
    return x * 3


@case(lambda: (t(3, 4), t(3, 4, grad=True)))
def nothing_but_a_write(x: Tensor, y: Tensor) -> None:
    x.copy_(y * 2)


@case(lambda: (t(4, 4),))
@case(lambda: (result(4, 4),), "requires grad")
def write_through_a_view(x: Tensor) -> Tensor:
    x[1:3].mul_(2)
    return x.sum(0)


@case(lambda: (result(4, 4),))
def write_through_views_of_views(x: Tensor) -> tuple[Tensor, Tensor]:
    row = x.t()[1:][0]
    row.zero_()
    x.diagonal().add_(3)
    return row, x * 2


@case(lambda: ((lambda base: (base[0], base[1]))(t(2, 5)),))
def write_to_one_of_two_views_of_a_tensor(pair: tuple[Tensor, Tensor]) -> Tensor:
    pair[0].add_(1)
    return pair[0] + pair[1]


@case(lambda: (lambda base: (base, base[1]))(t(2, 5)))
@case(lambda: (lambda base: (base[:1], base[1]))(result(2, 5)), "requires grad")
def write_to_an_alias_of_another_input(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    y.mul_(3)
    return x + 1, y.sin()


@case(lambda: (lambda x: (x, x))(t(3)))
@case(lambda: (lambda x: (x, x))(result(3)), "requires grad")
def same_input_twice(x: Tensor, y: Tensor) -> Tensor:
    x.add_(1)
    return x * y


@case(lambda: (t(3, 4),), fullgraph=False)
def transpose_in_place(x: Tensor) -> Tensor:
    x.t_()
    return x * 2


@case(lambda: (t(3, 4),), fullgraph=False)
def transpose_and_write(x: Tensor) -> Tensor:
    x.transpose_(0, 1)
    x.mul_(2)
    return x + 1


@case(lambda: (t(1, 3),), fullgraph=False)
@case(lambda: (result(1, 3),), "requires grad", fullgraph=False)
def squeeze_in_place(x: Tensor) -> Tensor:
    x.squeeze_(0)
    return x * 2


@case(lambda: (t(3),), fullgraph=False)
def unsqueeze_in_place(x: Tensor) -> Tensor:
    return x.unsqueeze_(0).cos()


@case(lambda: (t(3, 4), t(3, 4)), fullgraph=False)
def set_data(x: Tensor, y: Tensor) -> Tensor:
    x.set_(y)
    return x * 2


@case(lambda: (t(6),), fullgraph=False)
def resize(x: Tensor) -> Tensor:
    y = x * 2
    y.resize_(2, 3)
    return y


@case(lambda: (torch.arange(5), t(5)))
def write_integers_and_floats(i: Tensor, x: Tensor) -> Tensor:
    i.add_(1)
    x.mul_(i)
    return x.sum() + i.sum()


@case(lambda: (t(5) > 0,))
def write_bools(x: Tensor) -> Tensor:
    x.logical_not_()
    return x.sum()


@case(lambda: (torch.randn(3, dtype=torch.complex64),))
def write_the_real_part(x: Tensor) -> Tensor:
    x.real.add_(1)
    return x.abs()


@case(lambda: (torch.randn(3, dtype=torch.complex64).conj(),))
def write_a_conjugate(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


@case(lambda: (t(3, 4), torch.tensor([0, 2])))
def write_by_index(x: Tensor, i: Tensor) -> Tensor:
    x[i] = 1.5
    x.index_add_(0, i, torch.ones(2, 4))
    return x.sum()


@case(lambda: (t(3, 4), t(3, 4)))
def swap(x: Tensor, y: Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


@case(lambda: ([t(3), t(4)],))
def foreach_in_place(xs: list[Tensor]) -> Tensor:
    torch._foreach_mul_(xs, 2.0)
    return xs[0].sum()


@case(lambda: (t(2, 3), nn.BatchNorm1d(3)))
@case(lambda: (result(2, 3), nn.BatchNorm1d(3, momentum=None)), "cumulative", fullgraph=False)
@case(lambda: (t(2, 3), nn.BatchNorm1d(3).eval()), "evaluation")
def batch_norm(x: Tensor, norm: nn.Module) -> Tensor:
    return norm(x)


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean.lerp_(x.detach().mean(0), 0.5)
        return (x - self.mean) * self.weight


@case(lambda: (t(2, 3), Counter()))
def buffers_of_a_module(x: Tensor, module: nn.Module) -> Tensor:
    return module(x) + module(x + 1)


@case(lambda: (t(2, 3), Counter()))
def buffers_without_gradients(x: Tensor, module: nn.Module) -> Tensor:
    with torch.no_grad():
        return module(x)


class Writes(torch.autograd.Function):
    """Writes to a tensor in the forward pass, the backward pass, or both."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, t: Tensor, forward: bool, backward: bool) -> Tensor:
        ctx.t, ctx.backward_too = t, backward
        if forward:
            t.mul_(2)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.backward_too:
            ctx.t.add_(grad)
        return grad * 2, None, None, None


@case(lambda: (t(3, grad=True), t(3)))
@case(lambda: (t(3, grad=True), t(3)), "dynamic", dynamic=True)
@case(lambda: (t(3, grad=True), t(6)[::2]), "strided")
def write_in_the_backward_pass(x: Tensor, y: Tensor) -> Tensor:
    return Writes.apply(x, y, False, True).sin()


@case(lambda: (t(3, grad=True), t(3)))
def write_in_both_passes(x: Tensor, y: Tensor) -> Tensor:
    return Writes.apply(x, y, True, True).sin() * 2


@case(lambda: (t(3, grad=True), t(3)))
def write_in_both_passes_and_use(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    z = Writes.apply(x, y, True, True)
    return (z * y).sin(), y + 1


@case(lambda: (t(4, 3, grad=True), t(6)))
def write_to_views_in_both_passes(x: Tensor, y: Tensor) -> Tensor:
    return Writes.apply(x[0], y[::2], True, True).sin() + Writes.apply(x[1], y[3:], True, False)


@case(lambda: (t(3, grad=True), result(3)))
def write_to_a_detached_tensor_in_the_forward_pass(x: Tensor, y: Tensor) -> Tensor:
    return Writes.apply(x, y.detach(), True, False) * y


@case(lambda: (t(3, grad=True), t(3)))
def write_in_the_forward_pass_of_a_function(x: Tensor, y: Tensor) -> Tensor:
    return Writes.apply(x, y, True, False) + y


@case(lambda: (t(3, grad=True), t(3)))
def two_writes_in_the_backward_pass(x: Tensor, y: Tensor) -> Tensor:
    return Writes.apply(Writes.apply(x, y, False, True).cos(), y, False, True)


class Statistics(nn.Module):
    """Adds the gradient to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        return Writes.apply(x, self.seen, False, True)


@case(lambda: (t(3, grad=True), Statistics()))
def write_to_a_buffer_in_the_backward_pass(x: Tensor, module: nn.Module) -> Tensor:
    return module(x.sin()).cos()


@case(lambda: (t(3, grad=True), Statistics()))
def read_a_buffer_that_the_backward_pass_writes(x: Tensor, module: nn.Module) -> Tensor:
    return module(x * module.seen.exp()).cos()
