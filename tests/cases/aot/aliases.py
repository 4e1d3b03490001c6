"""Outputs that are inputs, or views of inputs, of other outputs or of unreturned intermediates; strides; constants."""

from __future__ import annotations

from typing import Any

import torch

from .table import case, result, t

Tensor = torch.Tensor


@case(lambda: (t(3, 4),))
@case(lambda: (t(3, 4, grad=True),), "requires grad")
@case(lambda: (t(3, 4, grad=True),), "dynamic", dynamic=True)
def returned_input(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x + 1


@case(lambda: (t(3, 4),))
@case(lambda: (t(3, 4, grad=True),), "requires grad")
@case(lambda: (t(3, 4, grad=True),), "dynamic", dynamic=True)
def views_of_the_input(x: Tensor) -> tuple[Tensor, ...]:
    return x.t(), x[1:], x.view(-1), x.unsqueeze(0), x.detach(), x + 1


@case(lambda: (t(3, 4, grad=True),))
def view_of_a_view_of_the_input(x: Tensor) -> Tensor:
    return x.t()[1:].unsqueeze(0)


@case(lambda: (t(3, 4, grad=True).t(),))
def view_of_an_input_that_is_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[0], x * 2


@case(lambda: (result(3, 4),))
def view_after_a_write(x: Tensor) -> tuple[Tensor, Tensor]:
    x.mul_(2)
    return x.t(), x[0] + 1


@case(lambda: (result(3, 4),))
def view_before_a_write(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.view(-1)
    x.mul_(2)
    return y, y + 1


@case(lambda: (t(3, 4, grad=True),))
@case(lambda: (t(3, 4),), "plain")
@case(lambda: (t(3, 4, grad=True),), "dynamic", dynamic=True)
def intermediate_and_its_views(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y, y.t(), y[1:]


@case(lambda: (t(3, 4, grad=True),))
@case(lambda: (t(3, 4),), "plain")
def views_of_an_intermediate_that_is_not_returned(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return y.t(), y[1:], y.view(-1)[2:5]


@case(lambda: (t(4, 4, grad=True),))
def one_view_of_an_intermediate(x: Tensor) -> Tensor:
    return (x * 2).t()


@case(lambda: (t(4, 6, grad=True),))
@case(lambda: (t(4, 6),), "plain")
def chunks_and_splits(x: Tensor) -> list[Tensor]:
    y = x + 1
    return [*y.chunk(2), *y.unbind(1)[:2], *x.split(2)]


@case(lambda: (t(3, 4, grad=True),))
def write_to_an_intermediate_by_a_view(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    z = y[0]
    z.add_(1)
    return y, z


@case(lambda: (t(3, 4, grad=True),))
def detached_outputs(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y, y.detach(), x.detach(), y.detach().t()


@case(lambda: (t(3, 4, grad=True),))
def same_result_twice(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    return y, y


@case(lambda: (t(3, 4, grad=True), t(3, 4)))
def not_all_outputs_are_differentiable(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    return x * 2, y * 2, (x > 0), x.argmax(), x.detach() + 1


@case(lambda: (t(3, 4, grad=True),))
def numbers_and_none(x: Tensor) -> tuple[Any, ...]:
    return x * 2, None, x.shape[0], 1.5, "text", [x.dim()], {"a": x.sum()}


@case(lambda: (t(3, 4),))
def constants(x: Tensor) -> tuple[Tensor, ...]:
    return torch.ones(2), torch.arange(3), x + 1, torch.tensor([1, 2])


@case(lambda: (t(3, 4, grad=True),))
def no_outputs(x: Tensor) -> tuple[()]:
    x * 2
    return ()


@case(lambda: (t(2, 3, 4, 5).to(memory_format=torch.channels_last).requires_grad_(),))
def channels_last(x: Tensor) -> tuple[Tensor, ...]:
    return x * 2, x.permute(0, 2, 3, 1), x.contiguous() + 1


@case(lambda: (t(3, 1, grad=True),))
def expanded(x: Tensor) -> tuple[Tensor, ...]:
    y = x * 2
    return y.expand(3, 4), x.expand(3, 5), x.expand(2, 3, 1) + 1


@case(lambda: (t(3, 8, grad=True)[:, ::2],))
def strided_inputs_and_views(x: Tensor) -> tuple[Tensor, ...]:
    return (x + 1)[:, ::2], x[::2], x * 2


@case(lambda: (t(4, grad=True),))
def another_dtype_of_the_same_memory(x: Tensor) -> tuple[Tensor, ...]:
    return x.detach().view(torch.int32), (x * 2).detach().view(torch.int16), x * 2


@case(lambda: (torch.randn(3, 4, dtype=torch.complex64, requires_grad=True),))
def views_of_complex_numbers(x: Tensor) -> tuple[Tensor, ...]:
    return x.real, torch.view_as_real(x * 2), x.conj(), (x * 2).imag


@case(lambda: (lambda base: (base[0], base[1], base))(t(2, 3)))
def inputs_that_share_memory(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    return x + y, z[0], y


@case(lambda: (t(12),))
@case(lambda: (t(12, grad=True),), "requires grad")
def as_strided_views(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.as_strided((2, 3), (1, 2), 1), (x * 2).as_strided((2, 2), (3, 1))


@case(lambda: (t(0, 3, grad=True),))
def empty_tensors(x: Tensor) -> tuple[Tensor, ...]:
    return x * 2, x.t(), x.sum()


@case(lambda: (t(3),), around=torch.inference_mode)
@case(lambda: (t(3),), "dynamic", dynamic=True, around=torch.inference_mode)
def in_inference_mode(x: Tensor) -> tuple[Tensor, ...]:
    return x * 2, x[1:], (x + 1).view(1, 3)


@case(lambda: (t(3),), around=torch.inference_mode)
def write_in_inference_mode(x: Tensor) -> Tensor:
    x.mul_(2)
    return x.t()


@case(lambda: (t(3, grad=True),))
def inference_mode_inside(x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        y = x * 2
    return y, x.sin()


@case(lambda: (t(3, grad=True),), around=torch.no_grad)
def without_gradients(x: Tensor) -> tuple[Tensor, ...]:
    return x * 2, x, x[1:], x.detach()


@case(lambda: (t(3),), fullgraph=False)
def becomes_a_leaf(x: Tensor) -> Tensor:
    y = x * 2
    return y.requires_grad_()
