"""Lowerings of eigenvalues, singular values, and the pseudoinverse, which is computed from them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jax import Array, lax
from jax import numpy as jnp

from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..cpu import torch_kernels
from ..dtypes import DType
from ..graphs import is_result_used
from ..implementations import Implementations, Operand
from ..registry import lowers
from .comparison import is_nan
from .indexing import tril, triu
from .linalg import LinAlgError, adjoint, common_batch, matmul, nan_unless, require_convergence, transpose, zero_nonfinite


@dataclass(frozen=True)
class Eigenvalues:
    """The problem (see implementations.py) of computing the eigenvalues of symmetric or Hermitian matrices without eigenvectors.

    Attributes:
        shape: The shape of the matrices, (*batch, n, n).
        dtype: The dtype of the matrices.
        lower: True if the lower triangle is read, False for the upper one.
        platform: JAX's name of the platform.
    """

    shape: tuple[int, ...]
    dtype: DType
    lower: bool
    platform: str

    @property
    def operands(self) -> tuple[Operand]:
        return (Operand(self.shape, self.dtype),)

    @property
    def result_order(self) -> None:
        return None

    def __str__(self) -> str:
        return f"of {self.dtype}{list(self.shape)}"


EIGENVALUES: Implementations[Eigenvalues] = Implementations("eigenvalues")


# XLA:CPU calls a LAPACK routine that also computes the eigenvectors, which takes twice the time. For small matrices, calling torch costs
# more than it saves.
@EIGENVALUES.implementation("torch", platforms=["cpu"], preferred=lambda problem: math.prod(problem.shape) * problem.shape[-1] >= 1 << 16)
def _by_torch(problem: Eigenvalues, x: Array) -> Array:
    def write(buffers: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        torch.linalg.eigvalsh(tensors[0], "L" if problem.lower else "U", out=buffers[0])

    return torch_kernels.call(write, [x], [(x.shape[:-1], dtypes.real(problem.dtype))])[0]


@EIGENVALUES.implementation("xla")
def _by_xla(problem: Eigenvalues, x: Array) -> Array:
    return lax.linalg.eigh(x, lower=problem.lower, symmetrize_input=False)[1]


@lowers(aten._linalg_eigh.default)
def linalg_eigh(x: Array, UPLO: str = "L", compute_v: bool = True, *, ctx: Context) -> tuple[Array, Array | None]:
    """The eigenvalues, in ascending order, and the eigenvectors of symmetric or Hermitian matrices.

    Only the lower (or upper) triangle is read. The eigenvectors are None if the graph does not use them.

    Shape:  x (*batch, n, n) gives (*batch, n) and (*batch, n, n); without `compute_v`, the eigenvectors are an empty vector.
    Dtype:  the real dtype of x for the eigenvalues, that of x for the eigenvectors.
    Raises: LinAlgError when the program runs, if LAPACK does not converge and, as in eager mode, for NaNs in a matrix of more than two
            rows. A smaller matrix with a NaN, and any matrix with an infinite element, gives NaN.
    """
    lower = UPLO.upper() == "L"
    x = tril(x) if lower else triu(x)
    if x.shape[-1] > 2:
        require_convergence(x, ctx, "linalg.eigh")
    x, finite = zero_nonfinite(x)
    if compute_v and is_result_used(ctx.node, 1):
        vectors, values = lax.linalg.eigh(x, lower=lower, symmetrize_input=False)
        vectors = nan_unless(finite, vectors)
    else:
        problem = Eigenvalues(x.shape, x.dtype, lower, ctx.platform)
        values = ctx.choose(EIGENVALUES, problem).run(problem, x)
        vectors = None if compute_v else lax.full((0,), 0, x.dtype)
    require_convergence(values, ctx, "linalg.eigh")
    return nan_unless(finite, values), vectors


@lowers(aten._linalg_svd.default)
def linalg_svd(x: Array, full_matrices: bool = False, compute_uv: bool = True, *, ctx: Context) -> tuple[Any, Array, Any]:
    """The singular value decomposition: U, the singular values in descending order, and Vh.

    U and Vh are None if the graph uses neither of them. The results of a matrix with an infinite element are NaN.

    Shape:  x (*batch, m, n) gives (*batch, m, k), (*batch, k) and (*batch, k, n), where k = min(m, n). With `full_matrices`, U and Vh are
            square. Without `compute_uv`, they are empty vectors.
    Dtype:  that of x; for the singular values, the real dtype of x.
    Raises: LinAlgError when the program runs, for NaNs.
    """
    message = "linalg.svd: The algorithm failed to converge because the input matrix contained non-finite values."
    ctx.require(lax.bitwise_not(is_nan(x)), LinAlgError, message)
    x, finite = zero_nonfinite(x)
    empty = None if compute_uv else lax.full((0,), 0, x.dtype)
    if compute_uv and (is_result_used(ctx.node, 0) or is_result_used(ctx.node, 2)):
        u, s, vh = lax.linalg.svd(x, full_matrices=full_matrices)
        u, vh = nan_unless(finite, u), nan_unless(finite, vh)
    else:
        s, u, vh = lax.linalg.svd(x, compute_uv=False), empty, empty
    require_convergence(s, ctx, "linalg.svd")
    return u, nan_unless(finite, s), vh


# XLA implements eig on the CPU only.
@lowers(aten.linalg_eig.default, platforms=["cpu"])
def linalg_eig(x: Array, *, ctx: Context) -> tuple[Array, Array | None]:
    """The eigenvalues and the right eigenvectors. The eigenvectors are None if the graph does not use them.

    Shape:  x (*batch, n, n) gives (*batch, n) and (*batch, n, n).
    Dtype:  both: the complex dtype of x.
    Raises: when the program runs, RuntimeError for elements that are not finite, and LinAlgError if LAPACK does not converge.
    """
    x, finite = zero_nonfinite(x)
    ctx.require(finite, RuntimeError, "torch.linalg.eig: input tensor should not contain infs or NaNs.")
    values, *vectors = lax.linalg.eig(x, compute_left_eigenvectors=False, compute_right_eigenvectors=is_result_used(ctx.node, 1))
    require_convergence(values, ctx, "linalg.eig")
    return values, vectors[0] if vectors else None


@lowers(aten.linalg_pinv.atol_rtol_tensor)
def linalg_pinv(x: Array, *, atol: Array | None = None, rtol: Array | None = None, hermitian: bool = False, ctx: Context) -> Array:
    """The pseudoinverse. Singular values up to max(atol, rtol * the largest singular value) count as zero.

    Shape:  x (*batch, m, n) gives (*batch, n, m).
    Dtype:  that of x.
    Source: ATen native/LinearAlgebra.cpp, linalg_pinv and get_atol_rtol
    """
    if x.size == 0:
        return transpose(x)
    if hermitian:
        values, u = linalg_eigh(x, ctx=ctx)
        assert u is not None
        vh = adjoint(u)
    else:
        u, values, vh = linalg_svd(x, ctx=ctx)
    magnitudes = lax.abs(values)
    if rtol is None:
        rtol = jnp.float64(jnp.finfo(x.dtype).eps * max(x.shape[-2:]))
        if atol is not None:
            rtol = jnp.where(atol > 0, 0, rtol)
    if atol is None:
        atol = jnp.float64(0)
    largest = jnp.max(magnitudes, axis=-1, keepdims=True)
    tolerance = jnp.maximum(jnp.expand_dims(atol, -1), jnp.expand_dims(rtol, -1) * largest)
    inverses = jnp.where(magnitudes > tolerance, 1 / values, 0).astype(x.dtype)
    return matmul(*common_batch(adjoint(vh) * jnp.expand_dims(inverses, -2), adjoint(u)))
