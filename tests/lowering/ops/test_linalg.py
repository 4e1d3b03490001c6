"""Errors of linear algebra at run time (linalg_check_errors and others), and the matrix exponential."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.comparisons.compare import assert_equal, check
from support.comparisons.gradients import check_gradients

LinAlgError = torch.linalg.LinAlgError

SINGULAR = torch.tensor([[1.0, 2.0], [2.0, 4.0]])
INDEFINITE = torch.tensor([[1.0, 2.0], [2.0, 1.0]])
NOT_A_NUMBER = torch.tensor([[2.0, 0.0], [float("nan"), 3.0]])

ERRORS: dict[str, tuple[Callable[..., Any], torch.Tensor, type[Exception], str]] = {
    "cholesky": (torch.linalg.cholesky, INDEFINITE, LinAlgError, "linalg.cholesky: .*not positive-definite"),
    "cholesky of a batch": (torch.linalg.cholesky, torch.stack([torch.eye(2), INDEFINITE]), LinAlgError, "not positive-definite"),
    "cholesky_ex": (
        lambda x: torch.linalg.cholesky_ex(x, check_errors=True),
        INDEFINITE,
        LinAlgError,
        "linalg.cholesky_ex: .*not positive",
    ),
    "cholesky_inverse": (torch.cholesky_inverse, torch.zeros(2, 2), LinAlgError, "cholesky_inverse: .*singular"),
    "inv": (torch.linalg.inv, SINGULAR, LinAlgError, "linalg.inv: .*singular"),
    "inv_ex": (lambda x: torch.linalg.inv_ex(x, check_errors=True), SINGULAR, LinAlgError, "linalg.inv_ex: .*singular"),
    "solve": (lambda x: torch.linalg.solve(x, x), SINGULAR, LinAlgError, "linalg.solve: .*singular"),
    "solve_ex": (lambda x: torch.linalg.solve_ex(x, x, check_errors=True), SINGULAR, LinAlgError, "linalg.solve_ex: .*singular"),
    "lu_factor": (torch.linalg.lu_factor, SINGULAR, RuntimeError, "linalg.lu_factor: .*division by zero"),
    "lu_factor_ex": (lambda x: torch.linalg.lu_factor_ex(x, check_errors=True), SINGULAR, RuntimeError, "linalg.lu_factor_ex: .*by zero"),
    "svd": (torch.linalg.svd, NOT_A_NUMBER, LinAlgError, "linalg.svd: .*non-finite"),
    "pinv": (torch.linalg.pinv, NOT_A_NUMBER, LinAlgError, "linalg.svd: .*non-finite"),
    "eig": (torch.linalg.eig, NOT_A_NUMBER, RuntimeError, "linalg.eig: .*infs or NaNs"),
}


@pytest.mark.sample(usual=5)
@pytest.mark.parametrize("name", ERRORS)
def test_errors_match_eager_mode(name: str) -> None:
    function, matrix, error, message = ERRORS[name]
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    for call in (function, compiled):
        with pytest.raises(error, match=message):
            call(matrix.clone())
    assert_equal(compiled(torch.eye(2).expand_as(matrix)), function(torch.eye(2).expand_as(matrix)))


def test_no_input_is_written_after_an_error() -> None:
    def invert_and_clear(x: torch.Tensor) -> torch.Tensor:
        inverse = torch.linalg.inv(x)
        x.zero_()
        return inverse

    x = SINGULAR.clone()
    with pytest.raises(LinAlgError):
        torch.compile(invert_and_clear, backend="dynaxla", fullgraph=True)(x)
    assert torch.equal(x, SINGULAR)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.complex64])
def test_matrix_exp(dtype: torch.dtype) -> None:
    sizes = torch.tensor([0.0, 0.01, 0.4, 1.1, 3.0]).reshape(5, 1, 1)
    x = torch.randn(5, 4, 4, dtype=dtype) * sizes
    x[1] = -x[4] @ x[4].mH
    check(torch.linalg.matrix_exp, x, tolerance=None if dtype == torch.float64 else (1e-4, 1e-4))
    check(torch.linalg.matrix_exp, x[3].mT, tolerance=None if dtype == torch.float64 else (1e-4, 1e-4))


def test_matrix_exp_of_special_matrices() -> None:
    check(torch.linalg.matrix_exp, torch.randn(3, 1, 1))
    check(torch.linalg.matrix_exp, torch.randn(2, 0, 0))
    check(torch.linalg.matrix_exp, torch.stack([NOT_A_NUMBER, INDEFINITE, torch.eye(2) * -300]))
    check(torch.linalg.matrix_exp, torch.tensor([[0.0, 1e30], [0.0, 0.0]]))


def test_gradient_of_matrix_exp() -> None:
    check_gradients(torch.linalg.matrix_exp, torch.randn(2, 3, 3, dtype=torch.float64))
