"""QR factorization in every mode, and products of Householder reflections."""

from __future__ import annotations

import pytest
import torch

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

DTYPES = [torch.float32, torch.complex128]


def factors(x: torch.Tensor) -> list[torch.Tensor]:
    """Values that do not depend on the signs of Q's columns, which linalg_qr may choose."""
    results = []
    for mode in ("reduced", "complete"):
        q, r = torch.linalg.qr(x, mode=mode)
        results += [q @ r, q.mH @ q, r.abs()]
    q, r = torch.linalg.qr(x, mode="r")
    packed, tau = torch.geqrf(x)
    return [*results, q, r.abs(), packed.triu().abs(), tau.abs()]


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors(dtype: torch.dtype) -> None:
    check(lambda x: factors(x) + factors(x[0, 0].mT) + factors(x[:, :, :1, :1]), torch.randn(2, 1, 4, 3, dtype=dtype), calls=1)


@pytest.mark.parametrize("shape", [(0, 0), (2, 3, 0), (0, 3), (0, 3, 2)])
def test_empty_matrices(shape: tuple[int, ...]) -> None:
    check(lambda x: [*torch.linalg.qr(x), *torch.linalg.qr(x, mode="complete"), *torch.linalg.qr(x, mode="r")], torch.randn(shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_reflections(dtype: torch.dtype) -> None:
    def products(packed: torch.Tensor, tau: torch.Tensor, c: torch.Tensor) -> list[torch.Tensor]:
        results = [torch.linalg.householder_product(packed, tau)]
        for transpose in (False, True):
            results.append(torch.ormqr(packed, tau, c, transpose=transpose))
            results.append(torch.ormqr(packed, tau, c.mT, left=False, transpose=transpose))
        return results

    packed, tau = torch.geqrf(torch.randn(2, 4, 3, dtype=dtype))
    check(products, packed, tau, torch.randn(2, 4, 5, dtype=dtype), calls=1)
    check(products, packed[0, :, :2], tau[0, :2], torch.randn(5, 4, dtype=dtype).mT, calls=1)
    check(products, packed[0, :, :0], tau[0, :0], torch.randn(4, 2, dtype=dtype), calls=1)
    check(torch.linalg.householder_product, packed, tau[:, :1], calls=1)


def test_gradients() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        q, r = torch.linalg.qr(x)
        wide_q, wide_r = torch.linalg.qr(y.mT)
        reflected = torch.linalg.householder_product(y, y[0] / 4)
        return [q @ q.mH, r.mH @ r, wide_q @ wide_r, reflected]

    check_gradients(function, torch.randn(2, 4, 3, dtype=torch.complex128), torch.randn(4, 2, dtype=torch.complex128))
