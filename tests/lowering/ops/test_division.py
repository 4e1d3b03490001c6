"""Divisions and remainders, exact also where XLA's are not: all signs, integral quotients, zeros and infinities."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from support.comparisons.compare import check
from support.comparisons.operands import FLOATS, INTEGERS, check_each, make, specials

pytestmark = pytest.mark.optimized


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_divisions_and_remainders(dtype: torch.dtype) -> None:
    """Integers are not divided by zero: eager mode raises."""
    x = torch.cat([specials(dtype), make(dtype, 200)])
    if dtype.is_floating_point:
        # eager mode's fmod returns nan if the quotient overflows; ours returns the remainder
        x = x[x.abs() != torch.finfo(dtype).max]
    y = specials(dtype)[:, None]
    if not dtype.is_floating_point:
        y = y[y != 0][:, None]
    # in eager mode, the smallest integer modulo -1 kills the process
    numbers: list[float] = [3, 7] if not dtype.is_signed else [3, -7]
    if dtype.is_floating_point:
        numbers += [-1, 0.37, -2.5]
    functions = [
        lambda x, y: torch.div(x, y, rounding_mode="floor"),
        lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        lambda x, y: torch.div(x, y, rounding_mode=None),
        lambda x, y: x // y,
        lambda x, y: x % y,
        lambda x, y: torch.fmod(x, y),
        lambda x, y: torch.remainder(5, y),
        lambda x, y: 5 // y,
    ]
    for number in numbers:
        functions += [
            lambda x, y, number=number: torch.div(x, number, rounding_mode="floor"),
            lambda x, y, number=number: torch.div(x, number, rounding_mode="trunc"),
            lambda x, y, number=number: x // number,
            lambda x, y, number=number: x % number,
            lambda x, y, number=number: torch.fmod(x, number),
            lambda x, y, number=number: x / number,
        ]
    check_each(functions, x, y)


def test_division_by_a_number_is_exact() -> None:
    """XLA's product with the reciprocal is wrong for two thirds of these numbers."""
    x = torch.arange(3000.0)
    check(lambda x, c: [(x * n) / n for n in (3, 7, 13, 41)] + [(x * 49) / c], x, torch.tensor(49.0), tolerance=(0, 0))


# Chains of divisions, with operands for which eager mode is finite and the merged division overflows.
LARGE = torch.tensor([1e30, 3.0])
CHAINS: dict[str, tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = {
    "quotient as numerator": (lambda a, b, c: (a / b) / c, [LARGE, torch.tensor([1e20, 7.0]), torch.tensor([1e20, 0.3])]),
    "quotient as denominator": (lambda a, b, c: a / (b / c), [LARGE, LARGE, LARGE]),
    "quotients as both": (lambda a, b: (a / b) / (b / a), [LARGE, LARGE]),
    "by keyword": (
        lambda a, b, c: torch.ops.aten.div.Tensor(a / b, other=c),
        [LARGE, torch.tensor([1e20, 7.0]), torch.tensor([1e20, 0.3])],
    ),
    "by numbers": (lambda a: a / 1e20 / 1e20, [torch.tensor([1e30, 2e25])]),
    "reciprocal as numerator": (lambda a, b: a.reciprocal() / b, [torch.tensor([1e-20, 3.0]), torch.tensor([1e-20, 7.0])]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_divisions_are_not_merged(name: str) -> None:
    function, operands = CHAINS[name]
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    assert torch.equal(compiled(*operands), function(*operands))


def test_gradient_of_a_small_divisor_is_finite() -> None:
    def gradients(divide: Callable[..., torch.Tensor]) -> tuple[torch.Tensor, ...]:
        x, y = (torch.tensor(value, requires_grad=True) for value in ([1e-25, 2.0], [1e-20, 3.0]))
        return torch.autograd.grad(divide(x, y).sum(), (x, y))

    torch.testing.assert_close(gradients(torch.compile(torch.div, backend="dynaxla", fullgraph=True)), gradients(torch.div))
