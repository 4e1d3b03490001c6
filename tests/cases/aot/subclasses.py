"""Tensor subclasses that wrap one tensor, two, or nested ones, and jagged tensors, as inputs, outputs, both, and written to."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from .table import case, result, t

Tensor = torch.Tensor


class Wrapper(torch.Tensor):
    """A tensor that wraps other tensors: the attributes that `parts` names."""

    parts: tuple[str, ...] = ()

    @staticmethod
    def __new__(cls: Any, *inner: Tensor) -> Any:
        first = inner[0]
        return torch.Tensor._make_wrapper_subclass(
            cls,
            first.shape,
            strides=first.stride(),
            storage_offset=first.storage_offset(),
            dtype=first.dtype,
            device=first.device,
            layout=first.layout,
            requires_grad=first.requires_grad,
        )

    def __init__(self, *inner: Tensor) -> None:
        for name, tensor in zip(self.parts, inner, strict=True):
            setattr(self, name, tensor)

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"{type(self).__name__}({', '.join(str(getattr(self, name)) for name in self.parts)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return list(self.parts), None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], _: Any, size: Any, stride: Any) -> Wrapper:
        return cls(*(inner[name] for name in cls.parts))

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = []
        for name in cls.parts:
            inner_args, inner_kwargs = pytree.tree_map_only(cls, lambda wrapper, name=name: getattr(wrapper, name), (args, kwargs or {}))
            results.append(op(*inner_args, **inner_kwargs))
        leaves, structure = zip(*map(pytree.tree_flatten, results), strict=True)
        wrapped = [cls(*group) if isinstance(group[0], torch.Tensor) else group[0] for group in zip(*leaves, strict=True)]
        out = pytree.tree_unflatten(wrapped, structure[0])
        from torch.utils._python_dispatch import return_and_correct_aliasing

        return return_and_correct_aliasing(op, args, kwargs or {}, out)


class One(Wrapper):
    parts = ("only",)


class Two(Wrapper):
    parts = ("first", "second")


def one(*shape: int, grad: bool = False) -> Tensor:
    return One(t(*shape)).requires_grad_(grad)


def two(*shape: int, grad: bool = False) -> Tensor:
    return Two(t(*shape), t(*shape)).requires_grad_(grad)


def nested(*shape: int, grad: bool = False) -> Tensor:
    return Two(One(t(*shape)), Two(t(*shape), t(*shape))).requires_grad_(grad)


def one_of_one(*shape: int, grad: bool = False) -> Tensor:
    return One(One(t(*shape))).requires_grad_(grad)


@case(lambda: (one(3, 4),), "one")
@case(lambda: (two(3, 4),), "two")
@case(lambda: (nested(3, 4),), "nested")
@case(lambda: (one_of_one(3, 4),), "one of one")
@case(lambda: (one(3, 4, grad=True),), "one, requires grad")
@case(lambda: (two(3, 4, grad=True),), "two, requires grad")
@case(lambda: (nested(3, 4, grad=True),), "nested, requires grad")
@case(lambda: (one(3, 4),), "one, without gradients", around=torch.no_grad)
@case(lambda: (one(3, 4, grad=True),), "one, dynamic", dynamic=True)
@case(lambda: (two(3, 4, grad=True),), "two, dynamic", dynamic=True)
def elementwise(x: Tensor) -> Tensor:
    return x.sin() * 2 + x


@case(lambda: (one(3, 4), t(3, 4)), "one")
@case(lambda: (two(3, 4, grad=True), t(3, 4)), "two")
def with_plain_tensors(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, y + 1


@case(lambda: (t(3, 4),))
@case(lambda: (t(3, 4, grad=True),), "requires grad")
def wrapped_inside(x: Tensor) -> Tensor:
    return Two(x * 2, x + 1) * 3


@case(lambda: (t(3, 4),))
@case(lambda: (t(3, 4),), "without gradients", around=torch.no_grad)
def only_wrapped_inside(x: Tensor) -> Tensor:
    return One(x * 2)


@case(lambda: (one(3, 4),), "one")
@case(lambda: (two(3, 4),), "two")
def unwrapped_inside(x: Any) -> Tensor:
    return getattr(x, "only", None) * 2 if isinstance(x, One) else x.first * x.second


@case(lambda: (one(3, 4),), "one")
@case(lambda: (two(3, 4),), "two")
@case(lambda: (nested(3, 4),), "nested")
def write_in_place(x: Tensor) -> Tensor:
    x.mul_(2)
    return x + 1


@case(lambda: (two(3, 4),), "two")
@case(lambda: (one(3, 4),), "one")
def views(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.t(), x.view(-1) * 2


@case(lambda: (one(3, 4),), "one")
@case(lambda: (two(3, 4, grad=True),), "two")
def returned_input(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x * 2


@case(lambda: (two(3, 4, grad=True),))
def detached(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.detach(), (x * 2).detach()


@case(lambda: (one(3, 4, grad=True), one(4, 2, grad=True)), "one")
@case(lambda: (two(3, 4, grad=True), two(4, 2, grad=True)), "two")
def product(x: Tensor, y: Tensor) -> Tensor:
    return (x @ y).relu()


class Net(nn.Module):
    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(wrap(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@case(lambda: (one(3, 4), Net(one)), "one")
@case(lambda: (two(3, 4), Net(two)), "two")
def parameters(x: Tensor, net: nn.Module) -> Tensor:
    return net(x)


class Named(torch.Tensor):
    """A subclass that wraps nothing."""


@case(lambda: (t(3, 4).as_subclass(Named),))
@case(lambda: (t(3, 4, grad=True).as_subclass(Named),), "requires grad")
def subclass_that_wraps_nothing(x: Tensor) -> Tensor:
    return x.sin() * 2


def jagged(*lengths: int, width: int = 4, grad: bool = False) -> Tensor:
    return torch.nested.nested_tensor([torch.randn(length, width) for length in lengths], layout=torch.jagged, requires_grad=grad)


@case(lambda: (jagged(2, 3),))
@case(lambda: (jagged(2, 3, grad=True),), "requires grad")
@case(lambda: (jagged(2, 3, grad=True),), "dynamic", dynamic=True)
def jagged_elementwise(x: Tensor) -> Tensor:
    return x.sin() * 2


@case(lambda: (jagged(2, 3, 1), nn.Linear(4, 2)))
@case(lambda: (jagged(2, 3, 1, grad=True), nn.Linear(4, 2)), "requires grad")
def jagged_linear(x: Tensor, net: nn.Module) -> Tensor:
    return net(x).relu()


@case(lambda: (jagged(2, 3, 1),))
def jagged_reduced(x: Tensor) -> tuple[Tensor, ...]:
    return x.sum(1), x.mean(-1), torch.softmax(x, -1)


@case(lambda: (jagged(2, 3, 1, grad=True),))
def jagged_padded(x: Tensor) -> Tensor:
    return x.to_padded_tensor(0.0) * 2


@case(lambda: (t(6, 4, grad=True), torch.tensor([0, 2, 6])))
def jagged_made_inside(values: Tensor, offsets: Tensor) -> Tensor:
    return torch.nested.nested_tensor_from_jagged(values * 2, offsets).cos().values()


@case(lambda: (jagged(2, 3, width=8, grad=True),), fullgraph=False)
def jagged_attention(x: Tensor) -> Tensor:
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(-2)


@case(lambda: (result(3, 4),))
def wrapped_result(x: Tensor) -> Tensor:
    return Two(x, x * 2).sum()
