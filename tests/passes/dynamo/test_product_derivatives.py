"""Tests of passes/dynamo/product_derivatives.py: gradients of products, with zeros, infinities and NaN, equal eager mode's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.comparisons.compare import assert_equal

INF, NAN = float("inf"), float("nan")
# Rows, columns and values of special elements. All other elements are between 0.5 and 1.5.
SPECIAL: dict[str, list[tuple[int, int, float]]] = {
    "none": [],
    "a zero": [(1, 2, 0.0)],
    "zeros": [(1, 2, 0.0), (1, 4, -0.0), (3, 0, 0.0), (4, 0, 0.0)],
    "an infinity": [(2, 2, INF)],
    "a NaN": [(0, 3, NAN)],
    "a zero and an infinity": [(1, 2, 0.0), (3, 5, INF)],
    "zeros and an infinity": [(1, 2, 0.0), (1, 4, 0.0), (1, 0, INF), (3, 0, 0.0)],
}
CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all": lambda x: x.prod(),
    "columns": lambda x: x.prod(0),
    "rows": lambda x: torch.prod(x, dim=-1, keepdim=True),
    "running down": lambda x: x.cumprod(0),
    "running along": lambda x: torch.cumprod(x, dim=-1),
}


def numbers(special: str) -> torch.Tensor:
    x = torch.rand(5, 6) + 0.5
    for row, column, value in SPECIAL[special]:
        x[row, column] = value
    return x


def results(function: Callable[..., Any], x: torch.Tensor, grad: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    out = function(leaf)
    (found,) = torch.autograd.grad(out, leaf, out.detach().cos().nan_to_num(2.0) if grad is None else grad)
    return out.detach(), found


def compiled(function: Callable[..., Any], **settings: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="dynaxla", fullgraph=True, **settings)


@pytest.mark.parametrize("name", CALLS)
def test_special_values(name: str) -> None:
    run = compiled(CALLS[name])
    for special in SPECIAL:
        x = numbers(special)
        found, expected = results(run, x), results(CALLS[name], x)
        if "infinity" in special and "zero" in special:  # NaN may replace a number of eager mode, but another number may not
            expected = expected[0], torch.where(found[1].isnan(), NAN, expected[1])
            assert found[1].isnan().sum() <= (results(CALLS[name], x)[1].isnan().sum() + 1)
        assert_equal(found, expected)


@pytest.mark.parametrize("name", CALLS)
def test_strided_inputs(name: str) -> None:
    run = compiled(CALLS[name])
    for x in (numbers("none").t(), numbers("none")[:, ::2]):
        assert_equal(results(run, x), results(CALLS[name], x))


def test_nan_in_incoming_gradient() -> None:
    for name, shape in (("columns", (6,)), ("running along", (5, 6))):
        grad = torch.randn(shape)
        grad.view(-1)[2] = NAN
        x = numbers("none")
        assert_equal(results(compiled(CALLS[name]), x, grad), results(CALLS[name], x, grad))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum().prod(0) + x.sum().cumprod(0),  # no dimensions
        lambda x: x.prod(0, dtype=torch.float64),
        lambda x: torch.vmap(lambda row: row.prod() * row.cumprod(0))(x),
        lambda x: torch.complex(x, x).prod(1).abs(),
        lambda x: x[:0].prod(0) * x[:, :0].cumprod(1).sum(),
    ],
)
def test_inputs_with_torchs_formula(function: Callable[..., Any]) -> None:
    x = numbers("none")
    assert_equal(results(compiled(function), x), results(function, x))


def test_dynamic_sizes_and_bfloat16() -> None:
    x = numbers("zeros")
    for name in ("rows", "running down"):
        assert_equal(results(compiled(CALLS[name], dynamic=True), x), results(CALLS[name], x))
        assert_equal(results(compiled(CALLS[name]), x.bfloat16()), results(CALLS[name], x.bfloat16()))


def test_without_gradients() -> None:
    x = numbers("zeros")
    with torch.no_grad():
        assert_equal(compiled(CALLS["rows"])(x), CALLS["rows"](x))
