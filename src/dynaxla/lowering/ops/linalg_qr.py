"""Lowerings of the QR factorization and of products of Householder reflections."""

from __future__ import annotations

from jax import Array, lax
from jax import numpy as jnp

from ...torch_ops import aten
from ..context import Context
from ..registry import lowers
from . import linalg


@lowers(aten.geqrf.default)
def geqrf(x: Array) -> tuple[Array, Array]:
    """The QR factorization in LAPACK's format: R and the Householder vectors in one matrix, and the factors tau of the reflections.

    R is on and above the diagonal, the Householder vectors are below it.

    Shape:  x (*batch, m, n) gives (*batch, m, n) and (*batch, min(m, n)).
    Dtype:  both: that of x.
    """
    reflections, tau = jnp.linalg.qr(x, mode="raw")
    return linalg.transpose(reflections), tau


@lowers(aten.linalg_householder_product.default)
def linalg_householder_product(reflections: Array, tau: Array) -> Array:
    """The first n columns of Q, the product of the reflections.

    Shape:  reflections (*batch, m, n) and tau (*batch, k), with k up to n, give (*batch, m, n).
    """
    return lax.linalg.householder_product(reflections, tau)


@lowers(aten.ormqr.default)
def ormqr(reflections: Array, tau: Array, x: Array, left: bool = True, transpose: bool = False) -> Array:
    """Q x, or with `left` False x Q, where Q is the square product of the reflections, or with `transpose` its adjoint.

    Shape:  that of x.
    """
    return lax.linalg.ormqr(reflections, tau, x, left=left, transpose=transpose)


@lowers(aten.linalg_qr.default)
def linalg_qr(x: Array, mode: str = "reduced", *, ctx: Context) -> tuple[Array, Array]:
    """The QR factorization x = Q R: Q has orthonormal columns, R is upper triangular. In mode "r", Q is an empty vector.

    Shape:  x (*batch, m, n) gives (*batch, m, k) and (*batch, k, n), where k is m in mode "complete", else min(m, n).
    Dtype:  both: that of x.
    """
    q, r = lax.linalg.qr(x, full_matrices=mode == "complete")
    return lax.full((0,), 0, x.dtype) if mode == "r" else q, r
