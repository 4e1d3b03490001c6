"""Eigenvalues, singular values and pseudoinverses. Vectors are compared by properties that do not depend on signs and bases."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from support.comparisons.compare import assert_equal, check
from support.comparisons.gradients import check_gradients

DTYPES = [torch.float32, torch.complex128]


def hermitian(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    x = torch.randn(*shape, dtype=dtype)
    return x + x.mH


def eigen(x: torch.Tensor) -> list[torch.Tensor]:
    results = []
    for triangle in ("L", "U"):
        values, vectors = torch.linalg.eigh(x, triangle)
        results += [values, (vectors * values.unsqueeze(-2)) @ vectors.mH, vectors.mH @ vectors, torch.linalg.eigvalsh(x, triangle)]
    return results


@pytest.mark.parametrize("dtype", DTYPES)
def test_eigenvalues_of_hermitian_matrices(dtype: torch.dtype) -> None:
    other = torch.randn(3, 3, dtype=dtype).mT  # not hermitian: each triangle stands for another matrix
    check(lambda x, y: eigen(x) + eigen(y), hermitian(2, 1, 4, 4, dtype=dtype), other, calls=1)


# The first size is too small for a call of torch's kernel.
@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("triangle", ["L", "U"])
def test_eigenvalues_without_vectors(size: int, triangle: str) -> None:
    x = torch.randn(3, size, size)
    compiled = torch.compile(lambda x: torch.linalg.eigh(x * 2, triangle)[0] + 1, backend="dynaxla")
    assert_equal(compiled(x), torch.linalg.eigvalsh(x * 2, triangle) + 1, tolerance=(1e-4, 1e-4))
    x[1, -1, 0] = x[1, 0, -1] = float("nan")
    with pytest.raises(torch.linalg.LinAlgError, match=r"linalg\.eigh"):
        compiled(x)


VALUES = {"eigvals": (torch.linalg.eigvals, "lapack_sgeev_ffi"), "svdvals": (torch.linalg.svdvals, "lapack_sgesdd_ffi")}


@pytest.mark.parametrize("name", VALUES)
def test_unused_vectors_are_not_computed(name: str, tmp_path: Path) -> None:
    function, call = VALUES[name]
    x = torch.randn(40, 40)
    values = torch.compile(lambda x: function(x * 2).abs().sort().values, backend="dynaxla", options={"dump": tmp_path})(x)
    assert_equal(values, function(x * 2).abs().sort().values, tolerance=(1e-3, 1e-3))
    (program,) = tmp_path.glob("*.stablehlo.mlir")
    (line,) = [line for line in program.read_text().splitlines() if call in line]
    modes = re.findall(r"(?:mode|compute_left|compute_right) = (\d+) : ui8", line)
    assert modes
    assert set(modes) == {str(ord("N"))}


def test_the_other_triangle_is_not_read() -> None:
    x, nan = hermitian(3, 3), torch.full((3, 3), float("nan"), dtype=torch.float64)
    check(torch.linalg.eigvalsh, x.tril() + nan.triu(1))
    check(lambda x: torch.linalg.eigvalsh(x, "U"), x.triu() + nan.tril(-1))


def singular(x: torch.Tensor) -> list[torch.Tensor]:
    results = [torch.linalg.svdvals(x)]
    for full in (False, True):
        u, s, vh = torch.linalg.svd(x, full_matrices=full)
        rank = s.shape[-1]
        results += [s, (u[..., :rank] * s.unsqueeze(-2)) @ vh[..., :rank, :], u.mH @ u, vh @ vh.mH]
    return results


@pytest.mark.parametrize("dtype", DTYPES)
def test_singular_values(dtype: torch.dtype) -> None:
    check(lambda x: singular(x) + singular(x[0, 0].mT), torch.randn(2, 1, 4, 3, dtype=dtype), calls=1)


@pytest.mark.parametrize("shape", [(2, 0, 0), (0, 3, 3), (1, 1)])
def test_empty_and_1x1_matrices(shape: tuple[int, ...]) -> None:
    check(lambda x: eigen(x) + singular(x) + [torch.linalg.pinv(x), torch.linalg.eigvals(x)], torch.randn(shape))


@pytest.mark.parametrize("shape", [(3, 0), (0, 3), (0, 3, 2)])
def test_empty_matrices_that_are_not_square(shape: tuple[int, ...]) -> None:
    check(lambda x: [*torch.linalg.svd(x), *torch.linalg.svd(x, full_matrices=False), torch.linalg.pinv(x)], torch.randn(shape))


def test_infinities_and_nans() -> None:
    """Some LAPACK libraries do not terminate for infinities."""
    infinite = torch.randn(2, 4, 4)
    infinite[1, 2, 1] = infinite[1, 1, 1] = float("inf")
    compiled = torch.compile(lambda x: [*torch.linalg.svd(x), *torch.linalg.eigh(x)], backend="dynaxla", fullgraph=True)
    for out in compiled(infinite):
        assert out[0].isfinite().all()
        assert out[1].isnan().all()
    check(torch.linalg.eigvalsh, torch.tensor([[1.0, 0.0], [float("nan"), 1.0]]))
    for function in (torch.linalg.eigvalsh, torch.compile(torch.linalg.eigvalsh, backend="dynaxla")):
        with pytest.raises(torch.linalg.LinAlgError, match=r"linalg.eigh: .*failed to converge"):
            function(infinite - infinite)


@pytest.mark.parametrize("dtype", DTYPES)
def test_eigenvalues(dtype: torch.dtype) -> None:
    """Eigenvalues of linalg_eig have no fixed order."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        values, vectors = torch.linalg.eig(x)
        return [values.abs().sum(-1), values.sum(-1), x.to(vectors.dtype) @ vectors - vectors * values.unsqueeze(-2), vectors.norm(dim=-2)]

    check(function, torch.randn(2, 4, 4, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pseudoinverses(dtype: torch.dtype) -> None:
    rank_deficient = torch.randn(4, 2, dtype=dtype) @ torch.randn(2, 3, dtype=dtype)
    tolerances = torch.tensor([0.0, 2.0])

    def pseudoinverses(x: torch.Tensor, tolerances: torch.Tensor) -> list[torch.Tensor]:
        square = x.mH @ x
        return [
            torch.linalg.pinv(x),
            torch.linalg.pinv(x, rtol=0.5),
            torch.linalg.pinv(x, atol=0.5),
            torch.linalg.pinv(x, atol=0.0),
            torch.linalg.pinv(x, atol=tolerances, rtol=tolerances.flip(0) / 8),
            torch.linalg.pinv(square, hermitian=True),
            torch.linalg.pinv(square, atol=tolerances, hermitian=True),
        ]

    check(pseudoinverses, rank_deficient, tolerances, tolerance=(1e-4, 1e-4) if dtype == torch.float32 else None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_gradients(dtype: torch.dtype) -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        values, vectors = torch.linalg.eigh(x.mH @ x)
        results = [values, vectors.abs(), torch.linalg.svdvals(x), torch.linalg.pinv(x), torch.linalg.matrix_norm(x, "nuc")]
        if dtype == torch.float64:  # PyTorch's formula for complex vectors inspects the gradient's values, so it cannot be traced
            u, s, vh = torch.linalg.svd(x, full_matrices=False)
            results.append((u * s.exp().unsqueeze(-2)) @ vh)
        return results

    check_gradients(function, torch.randn(2, 4, 3, dtype=dtype), tolerance=(1e-8, 1e-8))


def test_gradient_of_eigenvalues() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, vectors = torch.linalg.eig(x)
        return values.abs().sum(), vectors.abs().sum()

    check_gradients(function, torch.randn(3, 3, dtype=torch.float64))
