"""Results that share memory: if the caller writes to one of them, all others change, and gradients equal eager mode's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

# TorchDynamo reads the gradients of inputs.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

Tensor = torch.Tensor

BASES: dict[str, Callable[[Tensor], Tensor]] = {
    "packed": lambda a: a * 3,
    "transposed": lambda a: a.t() * 3,
    "written": lambda a: _with_row(a * 3),
    "transposed, written": lambda a: _with_row(a.t() * 3),
    "a part": lambda a: (a * 3)[:, 1:],
    "with gaps": lambda a: torch.empty_strided((2, 3), (8, 2)).copy_(a),
    "the input": lambda a: a,
    "the input, written": lambda a: a.mul_(2),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "base": lambda x: x,
    "alias": lambda x: x.view(x.shape),
    "flat": lambda x: x.view(-1) if x.is_contiguous() else x.as_strided((2,), (min(x.stride()),)),
    "transposed": lambda x: x.t(),
    "rows": lambda x: x[1:],
    "one of several": lambda x: x.unbind(0)[0],
    "chain": lambda x: x.unsqueeze(0)[:, 0].transpose(0, -1),
    "repeated": lambda x: x.expand(2, *x.shape),
    "detached": lambda x: x.detach(),
    "of another dtype": lambda x: x.detach().view(torch.int32),
}
ORDERS: list[tuple[str, ...]] = [
    *[order for name in VIEWS if name != "base" for order in ((name, "base"), ("base", name))],
    *[(first, second) for first, second in itertools.permutations(("alias", "flat", "repeated", "detached", "of another dtype"), 2)],
    ("transposed", "flat", "base"),
    ("detached", "rows", "alias"),
    ("of another dtype", "base", "chain"),
    ("one of several", "repeated", "base", "detached"),
]


def _with_row(x: Tensor) -> Tensor:
    x[1:].add_(1)
    return x


def _function(base: str, views: Sequence[str]) -> Callable[[Tensor], tuple[Tensor, ...]]:
    def function(a: Tensor) -> tuple[Tensor, ...]:
        value = BASES[base](a)
        return tuple(VIEWS[view](value) for view in views)

    return function


def _after_write(function: Callable[[Tensor], tuple[Tensor, ...]], written: int, gradients: bool) -> tuple[list[str], list[Any]]:
    """Writes to one result, and runs the backward pass. Returns the phases that raise, and all values afterwards."""
    leaf = torch.arange(1.0, 7.0).view(2, 3).requires_grad_(gradients)
    a = leaf * 1
    results = function(a)
    raised: list[str] = []
    try:
        results[written].add_(2)
    except RuntimeError:
        raised.append("write")
    values = [(result.detach().clone(), result.requires_grad, result.stride()) for result in (*results, a)]
    try:
        losses = [(result * (index + 1)).sin().sum() for index, result in enumerate(results) if result.requires_grad]
        if losses:
            torch.stack(losses).sum().backward()
    except RuntimeError:
        raised.append("backward")
    return raised, [*values, torch.zeros(()) if leaf.grad is None else leaf.grad]


def _check(base: str, views: Sequence[str], gradients: bool, dynamic: bool | None = None) -> None:
    function = _function(base, views)
    compiled = torch.compile(function, backend="dynaxla", dynamic=dynamic)
    for written in range(len(views)):
        raised, expected = _after_write(function, written, gradients)
        found_raised, found = _after_write(compiled, written, gradients)
        if found_raised != raised:  # AOTAutograd hides from autograd that several views from one op share memory
            raised, expected = _after_write(torch.compile(function, backend="aot_eager", dynamic=dynamic), written, gradients)
        assert found_raised == raised
        torch.testing.assert_close(found, expected)


@pytest.mark.sample(usual=5)
@pytest.mark.parametrize("views", ORDERS, ids=" - ".join)
@pytest.mark.parametrize("base", ["packed", "transposed"])
def test_views_and_bases(base: str, views: Sequence[str]) -> None:
    _check(base, views, gradients=True)


@pytest.mark.parametrize("views", [order for order in ORDERS if len(order) > 2], ids=" - ".join)
# If gradients are needed, AOTAutograd fails for views of a part of a computed value.
@pytest.mark.sample(usual=4)
@pytest.mark.parametrize(("base", "gradients"), [pair for pair in itertools.product(BASES, (True, False)) if pair != ("a part", True)])
def test_other_bases(base: str, gradients: bool, views: Sequence[str]) -> None:
    _check(base, views, gradients)


@pytest.mark.parametrize("base", ["transposed", "transposed, written", "the input, written"])
def test_dynamic_sizes(base: str) -> None:
    _check(base, ("transposed", "rows", "base"), gradients=True, dynamic=True)


def test_view_has_its_base_in_autograd() -> None:
    a = torch.ones(2, 3, requires_grad=True)
    view, base = torch.compile(_function("packed", ("flat", "base")), backend="dynaxla")(a)
    assert view._base is base
    assert not base._is_view()
