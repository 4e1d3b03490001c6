"""Reductions: values, dtypes, NaN, ties, empty dimensions, and gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from support.comparisons.compare import assert_equal, check
from support.comparisons.gradients import check_gradients
from support.releases import IS_OLDEST, cases

inf, nan = float("inf"), float("nan")

Case = Callable[[torch.Tensor], Any]

SUMS: dict[str, Case] = {
    "sum": lambda x: (
        x.sum(),
        x.sum(1),
        x.sum((0, -1), keepdim=True),
        x.sum(()),
        x.sum(dim=[]),
        x[0, 0, 0].sum(-1),
        x.sum(0, dtype=torch.float64),
    ),
    "mean": lambda x: (x.mean(), x.mean(-2), x.mean((0, 1), keepdim=True), x[0, 0, 0].mean(), x.mean(1, dtype=torch.float64)),
    "prod": lambda x: (x.prod(), x.prod(1), x.prod(-1, keepdim=True), x[0, 0, 0].prod(0)),
    "var": lambda x: (x.var(), x.var(1), x.var((0, 2), correction=0, keepdim=True), x.var(1, correction=2.5)),
    "std": lambda x: (x.std(), x.std(-1), x.std((0, 2), unbiased=False, keepdim=True)),
    "moments": lambda x: (torch.var_mean(x), torch.var_mean(x, (0, 1), correction=0, keepdim=True), torch.std_mean(x, 1)),
    "norms": lambda x: [
        torch.linalg.vector_norm(x, p, d) for p, d in ((2, None), (2, 1), (1, (0, 2)), (3, 1), (0.5, 1), (inf, 2), (-inf, 2), (0, 1))
    ],
    "other norms": lambda x: (x.norm(), x.norm(dim=1), x.norm(p=1, dim=(0, 1), keepdim=True), torch.dist(x, x[0] * 2, 3)),
    "trace": lambda x: x[0].trace(),
}
EXTREMA: dict[str, Case] = {
    "values": lambda x: (x.amax(), x.amin(1), x.amax((0, 2), keepdim=True), x.amin(()), x.max(), x.min(), x[0, 0, 0].amax()),
    "with indices": lambda x: (x.max(1), x.min(-1, keepdim=True), x[0, 0, 0].max(0), x[0, 0, 0].min(0)),
    "aminmax": lambda x: (x.aminmax(), x.aminmax(dim=1), x.aminmax(dim=-1, keepdim=True)),
}


@pytest.mark.sample(usual=3)
@pytest.mark.parametrize("case", cases({**SUMS, **EXTREMA}, {"aminmax": "aminmax has no gradient"}))
def test_reductions(case: str) -> None:
    check_gradients({**SUMS, **EXTREMA}[case], torch.randn(4, 3, 5).mT)


VIEWS: dict[str, Case] = {
    "transposed": lambda x: x.mT,
    "permuted": lambda x: x.permute(2, 0, 1),
    "slices of rows": lambda x: x[..., 3:],
    "slices": lambda x: x[:, 2:],
    "strided": lambda x: x[:, :, ::2],
    "transposed slices": lambda x: x[..., 3:].mT,
    "slices of a transposed tensor": lambda x: x.mT[..., 1:].detach(),
    "first slices": lambda x: x[1:],
}


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("view", VIEWS)
def test_reductions_of_views(view: str) -> None:
    """A view, and a function of a view, is reduced in its memory order. Rows are long enough for several steps of a loop."""
    reductions: list[Callable[..., torch.Tensor]] = [
        torch.sum,
        torch.mean,
        torch.amax,
        torch.amin,
        torch.nansum,
        torch.linalg.vector_norm,
        lambda x, dim=None, keepdim=False: torch.linalg.vector_norm(x, inf, dim, keepdim),
        lambda x, dim=(), keepdim=False: torch.mean(x * 2, dim, keepdim),
    ]
    others: list[Callable[..., Any]] = [
        torch.var,
        torch.logsumexp,
        lambda x, dim: torch.std_mean(x.exp() - x, dim),
        lambda x, dim: torch.logsumexp(x * 2, dim),
    ]

    def function(x: torch.Tensor) -> Any:
        results = []
        for view_of_x in (VIEWS[view](x), VIEWS[view](x.abs())):
            results += [reduce(view_of_x) for reduce in (*reductions, torch.prod, torch.aminmax, torch.max)]
            for dims in ((0,), (1,), (-1,), (0, 1), (0, 2), (2, 1), (0, 1, 2)):
                results += [reduce(view_of_x, dim=dims, keepdim=keepdim) for reduce in reductions for keepdim in (False, True)]
            results += [reduce(view_of_x, dim=dims) for dims in ((1,), (0, 2), (0, 1, 2)) for reduce in others]
            results += [view_of_x.prod(dim) for dim in range(3)] + [view_of_x.aminmax(dim=1), view_of_x.max(0)]
        return results

    x = torch.randn(35, 70, 40, dtype=torch.float64)
    x[3, 4, 5] = nan
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    for operand in (x, torch.randn(35, 70, 40, dtype=torch.float64)):
        assert_equal(compiled(operand), function(operand))


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("shape", [(4, 40, 140), (1000, 130), (7, 9, 150), (3, 16, 8, 129), (1, 1, 64, 128)], ids=str)
def test_reductions_of_long_rows(shape: tuple[int, ...]) -> None:
    """Also of slices and of functions of slices, over all dimensions and over all but the first."""
    reductions: list[Callable[..., torch.Tensor]] = [torch.sum, torch.mean, torch.amax, torch.amin, torch.linalg.vector_norm, torch.var]

    def function(x: torch.Tensor, y: torch.Tensor) -> Any:
        crops, dims = (x[..., 2:-2, 3:-1], (x[..., 1:] - x[..., :-1]).abs(), y * 2, y.exp().flip(-1)), tuple(range(x.ndim))
        return [reduce(crop, dim=reduced_dims) for crop in crops for reduce in reductions for reduced_dims in (dims, dims[1:])], x.prod()

    larger = [*shape[:-2], shape[-2] + 4, shape[-1] + 4]
    check(function, torch.rand(larger, dtype=torch.float64) + 0.5, torch.randn(shape, dtype=torch.float64), calls=1)
    check(lambda x: [reduce(x[..., 1:]) for reduce in reductions], torch.randn(shape, dtype=torch.bfloat16), calls=1)


@pytest.mark.parametrize("reduce", [torch.sum, torch.mean, torch.amax, torch.prod, torch.linalg.vector_norm])
def test_reduced_operand_is_not_transposed(reduce: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    """XLA would read a transposed operand with large strides."""
    compiled = torch.compile(lambda x: reduce(x.t()) * 2, backend="dynaxla", options={"dump": str(tmp_path)})
    compiled(torch.randn(300, 200))
    (program,) = tmp_path.glob("*.hlo.txt")
    assert "reduce" in program.read_text()
    assert " transpose(" not in program.read_text()


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_inexact_dtypes(dtype: torch.dtype) -> None:
    excluded = ("norms", "sum", "mean", "moments") if dtype.is_complex else ("trace",) if IS_OLDEST and dtype.itemsize < 4 else ()
    cases = [case for name, case in SUMS.items() if name not in excluded]  # torch 2.11 has no trace of half types
    check(lambda x: [case(x) for case in cases], torch.randn(4, 5, 3).to(dtype).mT, calls=1)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int64])
def test_integer_and_bool_dtypes(dtype: torch.dtype) -> None:
    """Sums and products are int64; extrema have the operand's dtype."""
    x = torch.randint(0, 2 if dtype == torch.bool else 100, (4, 3, 5)).to(dtype)
    check(
        lambda x: (
            x.sum(),
            x.sum(1),
            x.prod(2),
            x.sum(0, dtype=torch.int32),
            x.amax(1),
            x.amin(),
            x.max(1),
            x.min(0),
            x.count_nonzero(1),
            x.sum(0, dtype=torch.float32),
            x.nansum(1),
            x[0, 0, 0].sum(),
            x.logsumexp(1) if dtype != torch.bool else x.any(),
        ),
        x.mT,
        calls=1,
    )


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32, torch.bfloat16, torch.complex64])
def test_any_all_and_count_nonzero(dtype: torch.dtype) -> None:
    x = torch.tensor([[0, 0, 0], [0, 1, 0], [1, 1, 1]]).to(dtype)
    check(
        lambda x: (
            (x.any(), x.all(), x.any(1), x.all(0), x.any(0, keepdim=True), x.all((0, 1)), x.any((0, 1), keepdim=True), x[0, 0].any()),
            (x[:0].any(), x[:0].all(), x[:0].all(0), x.count_nonzero(), x.count_nonzero((0, 1)), x.any(()), x.all([])),
        ),
        x,
        calls=1,
    )


@pytest.mark.optimized
def test_indices_of_extrema() -> None:
    """The index is that of the first NaN, or else of the first of equal extrema."""
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0], [nan, 5.0, nan, -inf], [-inf, -inf, -inf, -inf], [0.0, -0.0, 2.0, nan], [inf, 1.0, inf, 2.0]])
    check(
        lambda x: (
            (x.argmax(), x.argmin(), x.argmax(1), x.argmin(1, keepdim=True), x.argmax(0), x.argmax(keepdim=True), x[0, 0].argmax(0)),
            (x.max(1), x.min(1), x.max(0), x.amax(1), x.amin(1), x.max(), x.min(), x.aminmax(dim=1), x[0].max(), x[0].min()),
        ),
        x,
        calls=1,
    )
    check(lambda x: (x.argmax(1), x.argmin(0), x.argmax(), x.max(1)), torch.randint(0, 3, (4, 5)), calls=1)


@pytest.mark.optimized
def test_nan_and_infinities() -> None:
    x = torch.tensor([[1.0, nan, 3.0], [nan, nan, nan], [inf, -inf, 0.0], [inf, inf, 1.0], [-inf, -inf, -inf]])
    check(
        lambda x: (
            x.sum(1),
            x.nansum(1),
            x.mean(1),
            x.prod(1),
            x.logsumexp(1),
            x.var(1),
            x.norm(dim=1),
            x.norm(p=inf, dim=1),
            x.nanmean(1),
        ),
        x,
        calls=1,
    )


def test_logsumexp() -> None:
    x = torch.randn(4, 3, 5)
    check_gradients(lambda x: (x.logsumexp(1), (x * 50).logsumexp((0, 2)), x.logsumexp(-1, keepdim=True), x[:0].logsumexp(0)), x)
    check(lambda x: (x.logsumexp(1), x[0, 0, 0].logsumexp(0)), x.bfloat16(), calls=1)


def test_empty_operands() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # degrees of freedom <= 0
        check(
            lambda x: (
                (x.sum(), x.sum(0), x.sum(1), x.mean(), x.prod(), x.prod(0), x.amax(1), x.max(1), x.argmax(1), x.nansum(0)),
                (x.var(0), x.std(), torch.var_mean(x, 0), x.norm(), x.norm(dim=0), x.any(0), x.logsumexp(1)),
            ),
            torch.zeros(0, 3),
            calls=1,
        )
        check(
            lambda x: (x.var(), x.var(0), x.std(1), x.var(1, correction=0), x[0, 0].var(), x.var(1, correction=9)),
            torch.randn(1, 3),
            calls=1,
        )


@pytest.mark.optimized
def test_large_sums_are_as_accurate_as_eager() -> None:
    x = torch.rand(3, 400_000)
    exact = x.double()

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(), x.sum(1), x.mean(1), x.t().mean(0), x.var(1), x.norm(dim=1)

    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    for mine, reference in zip(compiled(x), function(exact), strict=True):
        torch.testing.assert_close(mine.double(), reference, rtol=5e-7, atol=0)


@pytest.mark.optimized
def test_half_types_are_added_in_float32() -> None:
    x = torch.full((70_000,), 1e-1)
    for dtype in (torch.float16, torch.bfloat16):
        check(lambda x: (x.sum(), x.mean(), (x * 0.5).sum(0, dtype=torch.float32), x.var(correction=0)), x.to(dtype), calls=1)


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.int8, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_hash(dtype: torch.dtype) -> None:
    x = (torch.randn(3, 4, 5) * 5).to(dtype)
    check(
        lambda x: (
            torch.hash_tensor(x),
            torch.hash_tensor(x, 1),
            torch.hash_tensor(x, (0, -1), keepdim=True),
            torch.hash_tensor(x[0, 0, 0]),
        ),
        x.mT,
        calls=1,
    )


def test_hash_of_special_values() -> None:
    x = torch.tensor([[0.0], [-0.0], [float("inf")], [float("nan")], [1e-8]])
    check(lambda x: (torch.hash_tensor(x, 1), torch.hash_tensor(x[:0], 1)), x, calls=1)


@pytest.mark.parametrize("values", [[[True, False], [False, False]], [[2.0, 0.0], [0.5, 3.0]], [[2, 256], [0, 3]]])
def test_sums_and_products_in_bool(values: list[list[float]]) -> None:
    """They are `any` and `all`."""

    def reductions(x: torch.Tensor) -> list[torch.Tensor]:
        bools = {"dtype": torch.bool}
        return [
            x.sum(1, **bools),
            x.sum(**bools),
            *(() if IS_OLDEST else (x.nansum(0, **bools),)),  # torch 2.11 has no kernel
            x.prod(1, **bools),
            x.prod(**bools),
            x.prod(0, keepdim=True, **bools),
        ]

    x = torch.tensor(values)
    torch.testing.assert_close(torch.compile(reductions, backend="dynaxla", fullgraph=True)(x), reductions(x))


@pytest.mark.parametrize("name", ["sum", "prod", "nansum", "cumsum", "cumprod"])
def test_operand_is_first_cast_to_the_dtype_of_the_result(name: str) -> None:
    function = getattr(torch, name)
    dims = (0,) if name.startswith("cum") else ()
    check(lambda x: function(x, *dims, dtype=torch.float16), torch.tensor([1e5, -1e5, 1e-5]), calls=1)


def test_distance_of_two_dtypes() -> None:
    check(lambda x, y: torch.dist(x, y), torch.randn(3), torch.arange(3), calls=1)
