"""Ops with effects: effect tokens, custom ops that write, printing, assertions, and random numbers, also functional ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch._functorch import config
from torch.utils.checkpoint import checkpoint

from .table import case, result, t

Tensor = torch.Tensor
noted: list[float] = []


@torch.library.custom_op("dynaxla_aot::note", mutates_args=())
def note(x: Tensor) -> Tensor:
    """Notes the sum of x. Adds the last two noted sums to the result, so that results depend on the order of calls."""
    before = sum(noted[-2:])
    noted.append(float(x.sum()))
    return x + before


note.register_fake(torch.empty_like)
note.register_autograd(lambda ctx, grad: grad * 2)
note.register_effect(torch._higher_order_ops.effects._EffectType.ORDERED)


@torch.library.custom_op("dynaxla_aot::write", mutates_args=("x",))
def write(x: Tensor, y: Tensor) -> None:
    x.add_(y)


@torch.library.custom_op("dynaxla_aot::write_and_return", mutates_args=("x",))
def write_and_return(x: Tensor, y: Tensor) -> Tensor:
    x.mul_(2)
    return x + y


write_and_return.register_fake(lambda x, y: torch.empty_like(x))


@torch.library.custom_op("dynaxla_aot::write_list", mutates_args=("xs",))
def write_list(xs: list[Tensor]) -> None:
    for x in xs:
        x.mul_(3)


@contextlib.contextmanager
def without_notes() -> Iterator[None]:
    noted.clear()
    yield


@contextlib.contextmanager
def without_notes_and_gradients() -> Iterator[None]:
    with without_notes(), torch.no_grad():
        yield


@case(lambda: (t(3),), around=without_notes)
@case(lambda: (t(3),), "without gradients", around=without_notes_and_gradients)
@case(lambda: (t(3),), "dynamic", around=without_notes, dynamic=True)
def ordered_effects(x: Tensor) -> tuple[Tensor, Tensor]:
    return note(note(x * 2) + 1), note(x)


@case(lambda: (t(3, grad=True),), around=without_notes)
def ordered_effects_in_training(x: Tensor) -> Tensor:
    return note(note(x * 2).sin())


@case(lambda: (t(3),), around=without_notes)
def effect_whose_result_is_unused(x: Tensor) -> tuple[Tensor, Tensor]:
    note(x * 5)
    return note(x), x + 1


@case(lambda: (t(3),), around=without_notes)
def effects_and_a_write(x: Tensor) -> Tensor:
    x.add_(1)
    y = note(x)
    x.mul_(2)
    return note(x) + y


@case(lambda: (t(3), t(3)))
@case(lambda: (t(6)[::2], t(3)), "strided")
def custom_op_that_writes(x: Tensor, y: Tensor) -> Tensor:
    write(x, y * 2)
    return x + 1


@case(lambda: (t(3, 3), t(3)))
def custom_op_that_writes_to_a_view(x: Tensor, y: Tensor) -> Tensor:
    write(x[1], y)
    return x.sum(0)


@case(lambda: (t(3, grad=True), t(3)))
def custom_op_that_writes_to_an_intermediate(x: Tensor, y: Tensor) -> Tensor:
    z = torch.zeros(3)
    write(z, y)
    return x * z


@case(lambda: (t(3), t(3)))
def custom_op_that_writes_and_returns(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return write_and_return(x, y) + 1, x * 2


@case(lambda: ([t(3), t(4)],))
def custom_op_that_writes_a_list(xs: list[Tensor]) -> Tensor:
    write_list(xs)
    return xs[0].sum() + xs[1].sum()


@case(lambda: (t(3),))
def printing_from_a_graph(x: Tensor) -> Tensor:
    torch.ops.aten._print("from a graph")
    return x * 2


@case(lambda: (t(3).abs(),))
def assertion_that_holds(x: Tensor) -> Tensor:
    torch._assert_async((x >= 0).all(), "no negative numbers")
    return x.sqrt()


@case(lambda: (-t(3).abs() - 1,))
def assertion_that_does_not_hold(x: Tensor) -> Tensor:
    x.add_(0)
    torch._assert_async((x >= 0).all(), "no negative numbers")
    return x.sqrt()


@case(lambda: (t(40, grad=True),), random=True)
@case(lambda: (t(40, grad=True),), "dynamic", random=True, dynamic=True)
@case(lambda: (t(40, grad=True),), "functional", random=True, around=lambda: config.patch(functionalize_rng_ops=True))
def dropout(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5) * 2


@case(lambda: (t(40),), random=True)
@case(lambda: (t(40),), "functional", random=True, around=lambda: config.patch(functionalize_rng_ops=True))
@case(lambda: (t(40),), "without gradients", random=True, around=torch.no_grad)
def random_numbers(x: Tensor) -> tuple[Tensor, ...]:
    return torch.rand(3) + x[:3], torch.randn_like(x), torch.randint(0, 9, (4,)), torch.randperm(5)


@case(lambda: (t(40),), random=True)
def random_write(x: Tensor) -> Tensor:
    x.uniform_(0, 1)
    return x.bernoulli_(0.5) * 2


@case(lambda: (t(40, grad=True),), random=True, around=lambda: config.patch(functionalize_rng_ops=True))
def functional_dropout_in_a_checkpoint(x: Tensor) -> Tensor:
    return checkpoint(lambda x: F.dropout(x.sin(), 0.5), x, use_reentrant=False)


@case(lambda: (result(8),), random=True)
def random_activation(x: Tensor) -> Tensor:
    return F.rrelu(x, training=True) + 1
