"""The QR factorization and products of Householder's reflections."""

from __future__ import annotations

from jax import Array, lax
from jax import numpy as jnp

from ...torch_ops import aten
from ..context import Context
from ..registry import lowers
from . import linalg


@lowers(aten.geqrf.default)
def geqrf(x: Array) -> tuple[Array, Array]:
    """R on and above the diagonal, the reflections' vectors below it, and their factors tau.

    Shape:  that of x (*batch, m, n); (*batch, min(m, n)).
    Dtype:  both: that of x.
    """
    reflections, tau = jnp.linalg.qr(x, mode="raw")
    return linalg.transpose(reflections), tau


@lowers(aten.linalg_householder_product.default)
def linalg_householder_product(reflections: Array, tau: Array) -> Array:
    """The first columns of the product Q of the reflections.

    Shape:  that of `reflections` (*batch, m, n); tau (*batch, k) with k up to n.
    """
    return lax.linalg.householder_product(reflections, tau)


@lowers(aten.ormqr.default)
def ormqr(reflections: Array, tau: Array, x: Array, left: bool = True, transpose: bool = False) -> Array:
    """Q x, or with `left` False x Q, Q being the square product of the reflections, or with `transpose` its adjoint.

    Shape:  that of x.
    """
    return lax.linalg.ormqr(reflections, tau, x, left=left, transpose=transpose)


@lowers(aten.linalg_qr.default)
def linalg_qr(x: Array, mode: str = "reduced", *, ctx: Context) -> tuple[Array, Array]:
    """Q, whose columns are orthonormal, and the upper triangle R, with x = Q R. In mode "r", Q is an empty vector.

    Shape:  x (*batch, m, n) gives (*batch, m, k) and (*batch, k, n): k is m in mode "complete", else the smaller of both.
    Dtype:  both: that of x.
    """
    q, r = lax.linalg.qr(x, full_matrices=mode == "complete")
    return lax.full((0,), 0, x.dtype) if mode == "r" else q, r
