"""Factorizations, and results that are computed from them."""

from typing import Any

import torch

from lowering.table.rows import FORMULA, Keywords, Make, Op, Samples, aten

DTYPES = (torch.float64, torch.float32, torch.complex64)
# Errors grow with the condition number of random matrices.
CONDITIONED = {torch.float32: (1e-3, 1e-3), torch.complex64: (1e-3, 1e-3), torch.float64: (1e-8, 1e-8)}


def square(*rest: Any) -> Samples:
    return lambda make, n: [(dominant(make(n, 3, 3)), *rest)]


def dominant(x: torch.Tensor) -> torch.Tensor:
    """Makes the diagonal larger, which keeps the condition number small."""
    return x.add_(6 * torch.eye(x.shape[-1], dtype=x.dtype))


def positive(x: torch.Tensor) -> torch.Tensor:
    """A hermitian, positive definite matrix with x's memory order."""
    return x.copy_(x @ x.transpose(-2, -1).conj() + torch.eye(x.shape[-1], dtype=x.dtype))


def definite(*rests: tuple[Any, ...]) -> Samples:
    return lambda make, n: [(positive(make(n, 3, 3)), *rest) for rest in rests]


def with_right_sides(make: Make, n: int) -> list[tuple[Any, ...]]:
    """Samples: both triangles, and systems with the matrix on either side."""
    return [
        (dominant(make(n, 3, 3)), make(n, *((3, 2) if left else (2, 3))), Keywords(upper=upper, left=left, unitriangular=upper))
        for upper in (False, True)
        for left in (False, True)
    ]


def factored(make: Make, n: int) -> list[torch.Tensor]:
    """LU factors of matrices with small condition numbers and permuted rows."""
    return list(aten.linalg_lu_factor_ex(dominant(make(n, 3, 3)).roll(1, -2))[:2])


ROWS: list[Op] = [
    Op(aten.linalg_cross.default, lambda make, n: [
        (make(n, 3), make(n, 3)), (make(3, n), make(3, 1), Keywords(dim=0)), (make(n, 3, 2), make(1, 3, 2), Keywords(dim=-2)),
    ], DTYPES, without=["empty"]),
    Op(aten.linalg_matrix_exp.default, lambda make, n: [(make(n, 3, 3) / 3,)], DTYPES, tolerance=CONDITIONED),
    # Cholesky factors and triangular systems
    # torch 2.14 has removed this op.
    *([Op(aten.cholesky.default, definite((), (True,)), DTYPES, tolerance=CONDITIONED)] if hasattr(aten, "cholesky") else []),
    Op(aten.linalg_cholesky_ex.default, definite((), (Keywords(upper=True),)), DTYPES, tolerance=CONDITIONED),
    Op(aten.cholesky_inverse.default, square(True), DTYPES[:2], tolerance=CONDITIONED),
    Op(aten.cholesky_solve.default, lambda make, n: [(make(n, 3, 2), dominant(make(n, 3, 3)), upper) for upper in (False, True)],
       DTYPES, tolerance=CONDITIONED),
    Op(aten.linalg_solve_triangular.default, with_right_sides, DTYPES, tolerance=CONDITIONED),
    Op(aten.triangular_solve.default, lambda make, n: [
        (make(n, 3, 2), dominant(make(n, 3, 3))), (make(n, 3, 2), dominant(make(n, 3, 3)), False, True, True),
    ], DTYPES, tolerance=CONDITIONED),
    # LU
    Op(aten._linalg_det.default, square(), DTYPES, tolerance=CONDITIONED),
    Op(aten._linalg_slogdet.default, square(), DTYPES, tolerance=CONDITIONED),
    Op(aten.linalg_inv_ex.default, square(), DTYPES, tolerance=CONDITIONED),
    Op(aten._linalg_solve_ex.default, lambda make, n: [
        (dominant(make(n, 3, 3)), make(n, 3, 2)), (dominant(make(n, 3, 3)), make(n, 2, 3), Keywords(left=False)),
    ], DTYPES[:2], tolerance=CONDITIONED),
    *(
        Op(op, lambda make, n: [(make(n, 4, 3),)], DTYPES, tolerance=CONDITIONED, **FORMULA)
        for op in (aten.linalg_lu.default, aten.linalg_lu_factor_ex.default)
    ),
    Op(aten.linalg_lu_solve.default, lambda make, n: [
        (*factored(make, n), make(n, 3, 2)), (*factored(make, n), make(n, 2, 3), Keywords(left=False, adjoint=True)),
    ], DTYPES, tolerance=CONDITIONED),
    Op(aten.lu_unpack.default, lambda make, n: [(make(n, 3, 3), factored(make, n)[1])], DTYPES),
    # Other factorizations, as far as their results are unique
    Op(aten._linalg_eigh.default, lambda make, n: [(make(n, 3, 3), triangle, False) for triangle in "LU"], DTYPES,
       tolerance=CONDITIONED, gradient=False),
    Op(aten._linalg_svd.default, lambda make, n: [(make(n, 3, 2), False, False)], DTYPES, tolerance=CONDITIONED, gradient=False),
    Op(aten.linalg_pinv.atol_rtol_tensor, lambda make, n: [
        (make(n, 3, 2),), (make(n, 3, 3), Keywords(atol=torch.tensor(1.5, dtype=torch.float64), hermitian=True)),
    ], DTYPES, tolerance=CONDITIONED, **FORMULA),
    Op(aten.linalg_householder_product.default, lambda make, n: [(make(n, 4, 3), make(n, 2))], DTYPES, tolerance=CONDITIONED,
       **FORMULA),
    Op(aten.ormqr.default, lambda make, n: [
        (make(n, 4, 2), make(n, 2), make(n, 3, 4), False, True),
    ], DTYPES, tolerance=CONDITIONED, **FORMULA),
    # Fourier transforms
    Op(aten._fft_c2c.default, lambda make, n: [(make(n, 3, 4), [1, 2], 1, True), (make(n, 3, 4), [0], 2, False)],
       (torch.complex64, torch.complex128)),
    Op(aten._fft_r2c.default, lambda make, n: [(make(n, 3, 4), [0, 2], 2, True), (make(n, 3, 4), [1], 0, False)],
       (torch.float32, torch.float64)),
    Op(aten._fft_c2r.default, lambda make, n: [(make(n, 3, 4), [1, 2], 2, size) for size in (6, 7)],
       (torch.complex64, torch.complex128)),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {
    # The op has no result.
    "lowering/ops/test_linalg.py": "aten._linalg_check_errors.default",
    # The signs of the results are not unique.
    "lowering/ops/test_linalg_eigen.py": "aten.linalg_eig.default",
    "lowering/ops/test_linalg_qr.py": "aten.geqrf.default aten.linalg_qr.default",
}
