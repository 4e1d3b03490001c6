"""Cholesky factorization and triangular systems: both triangles, and matrices that have no factor."""

from __future__ import annotations

import pytest
import torch

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

DTYPES = [torch.float32, torch.complex128]


def positive(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.randn(*shape, dtype=dtype)
    return x @ x.mH + torch.eye(shape[-1], dtype=dtype)


def factors(x: torch.Tensor) -> list[torch.Tensor]:
    return [out for upper in (False, True) for out in (*torch.linalg.cholesky_ex(x, upper=upper), torch.linalg.cholesky(x, upper=upper))]


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors(dtype: torch.dtype) -> None:
    check(lambda x, y: factors(x) + factors(y), positive(3, 1, 4, 4, dtype=dtype), positive(3, 3, dtype=dtype).mT, calls=1)


@pytest.mark.parametrize("shape", [(0, 0), (2, 0, 0), (0, 3, 3), (1, 1)])
def test_empty_and_1x1_matrices(shape: tuple[int, ...]) -> None:
    check(factors, positive(*shape))


def test_the_other_triangle_is_not_read() -> None:
    nan = torch.full((3, 3), float("nan"), dtype=torch.float64)
    check(lambda x: torch.linalg.cholesky_ex(x), positive(3, 3).tril() + nan.triu(1))
    check(lambda x: torch.linalg.cholesky_ex(x, upper=True), positive(3, 3).triu() + nan.tril(-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_info_is_the_minor_that_is_not_positive(dtype: torch.dtype) -> None:
    batch = positive(5, 4, 4, dtype=dtype)
    for index in range(4):
        batch[index, index, index] = -1 if index % 2 else float("nan")
    check(lambda x: (torch.linalg.cholesky_ex(x), torch.linalg.cholesky_ex(x, upper=True)), batch, calls=1)


@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize("upper", [False, True])
def test_solutions(upper: bool) -> None:
    dtype = torch.complex128

    def solutions(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
        results = [torch.cholesky_solve(b, a, upper=upper), torch.cholesky_inverse(a, upper=upper)]
        for unit in (False, True):
            results += [*torch.triangular_solve(b, a, upper=upper, transpose=unit, unitriangular=unit)]
            results.append(torch.linalg.solve_triangular(a, b, upper=upper, unitriangular=unit))
            results.append(torch.linalg.solve_triangular(a, c, upper=upper, left=False, unitriangular=unit))
        return results

    a = torch.randn(3, 3, dtype=dtype)
    a.diagonal().copy_(torch.tensor([2.0, 3.0, 4.0]))  # real, as the diagonal of a Cholesky factor
    check(solutions, a, torch.randn(2, 3, 2, dtype=dtype), torch.randn(2, 1, 2, 3, dtype=dtype), calls=1)
    check(solutions, a.expand(2, 3, 3).mT, torch.randn(3, 2, dtype=dtype), torch.randn(3, dtype=dtype).expand(4, 3), calls=1)
    check(solutions, a[:0, :0], torch.randn(0, 2, dtype=dtype), torch.randn(2, 0, dtype=dtype), calls=1)


def test_gradients() -> None:
    dtype = torch.complex128

    def function(x: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        factor = torch.linalg.cholesky(x @ x.mH + torch.eye(3, dtype=dtype))
        return [
            factor,
            torch.cholesky_solve(b, factor),
            torch.cholesky_inverse(factor),
            torch.linalg.solve_triangular(factor.mH, b, upper=True),
        ]

    check_gradients(function, torch.randn(2, 3, 3, dtype=dtype), torch.randn(2, 3, 2, dtype=dtype))
