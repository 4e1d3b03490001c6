"""LU factorization with its permutation, and solutions, inverses and determinants that use it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynaxla.errors import UnsupportedOp
from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

DTYPES = [torch.float64, torch.complex128]


def factors(x: torch.Tensor) -> list[torch.Tensor]:
    lu, pivots, info = torch.linalg.lu_factor_ex(x)
    unpacked = [*torch.lu_unpack(lu, pivots), *torch.lu_unpack(lu, pivots, unpack_data=False)]
    return [lu, pivots, info, *unpacked, *torch.linalg.lu(x)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors(dtype: torch.dtype) -> None:
    check(lambda x: factors(x) + factors(x[0, 0].mT), torch.randn(2, 1, 5, 3, dtype=dtype), calls=1)


@pytest.mark.parametrize("shape", [(2, 0, 0), (0, 3, 3), (3, 0), (0, 3), (1, 1)])
def test_empty_and_1x1_matrices(shape: tuple[int, ...]) -> None:
    check(factors, torch.randn(shape))


def test_info_is_the_first_zero_pivot() -> None:
    singular = torch.tensor([[[1.0, 2, 3], [2, 4, 6], [1, 1, 1]], [[0.0, 0, 1], [0, 1, 2], [0, 0, 3]], torch.eye(3).tolist()])
    check(factors, singular)
    check(lambda x: (torch.linalg.inv_ex(x)[1], torch.linalg.solve_ex(x, x)[1]), singular)


@pytest.mark.parametrize("function", [torch.linalg.lu, torch.linalg.lu_factor_ex])
def test_factorization_without_pivoting_raises(function: Callable[..., Any]) -> None:
    compiled = torch.compile(lambda x: function(x, pivot=False), backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    with pytest.raises(UnsupportedOp, match="without pivoting"):
        compiled(torch.eye(3))


def test_solutions() -> None:
    def solutions(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, vector: torch.Tensor) -> list[torch.Tensor]:
        lu, pivots = torch.linalg.lu_factor(a)
        results = [
            *torch.linalg.solve_ex(a, b),
            torch.linalg.solve(a, c, left=False).resolve_conj(),
            torch.linalg.solve(a, vector),
            *torch.linalg.inv_ex(a),
            torch.linalg.inv(a.mT),
        ]
        for adjoint in (False, True):
            results.append(torch.linalg.lu_solve(lu, pivots, b, adjoint=adjoint))
            results.append(torch.linalg.lu_solve(lu, pivots, c, left=False, adjoint=adjoint).resolve_conj())
        return results

    def random(*shape: int, dtype: torch.dtype = torch.complex128) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype)

    check(solutions, random(2, 4, 4), random(2, 4, 2), random(3, 1, 2, 4), random(2, 4), calls=1)
    check(solutions, *[random(*shape, dtype=torch.float64) for shape in ((4, 4), (3, 4, 2), (2, 4), (4,))], calls=1)
    check(solutions, random(0, 0), random(0, 2), random(2, 0), random(0), calls=1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_determinants(dtype: torch.dtype) -> None:
    def determinants(x: torch.Tensor) -> list[torch.Tensor]:
        # Includes the factors: the gradients read them as factors of x or of its transpose, as torch does.
        return [*torch._linalg_det(x), *torch._linalg_slogdet(x), torch.linalg.det(x), torch.logdet(x @ x.mH)]

    x = torch.randn(2, 4, 4, dtype=dtype)
    check(lambda x, y, empty: determinants(x) + determinants(y) + determinants(empty), x, x.mT, x[0, :0, :0], calls=1)


def test_determinants_of_singular_matrices() -> None:
    singular = torch.tensor([[[1.0, 2], [2, 4]], [[0.0, 0], [0, 0]], [[float("nan"), 1], [1, 1]]])
    check(lambda x: (torch.linalg.det(x), *torch.linalg.slogdet(x)), singular)


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize(("dtype", "transposed"), [(torch.complex128, False), (torch.float64, False), (torch.float64, True)])
def test_gradients(dtype: torch.dtype, transposed: bool) -> None:
    def function(x: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        results = [torch.linalg.det(x), *torch.linalg.slogdet(x), torch.linalg.solve(x, b)]
        if dtype == torch.float64:
            return results
        return [*results, torch.linalg.inv(x), *torch.linalg.lu(x)[1:], torch.linalg.lu_solve(*torch.linalg.lu_factor(x), b)]

    x = torch.randn(2, 3, 3, dtype=dtype)
    check_gradients(function, x.mT if transposed else x, torch.randn(2, 3, 2, dtype=dtype))


def test_gradient_of_a_singular_determinant() -> None:
    check_gradients(torch.linalg.det, torch.tensor([[1.0, 2.0], [2.0, 4.0]], dtype=torch.float64))
