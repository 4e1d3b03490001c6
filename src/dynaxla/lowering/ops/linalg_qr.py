"""The QR factorization and products of Householder's reflections."""

from __future__ import annotations

import torch
from jax import Array, lax
from jax import numpy as jnp

from ..context import Context
from ..registry import lowers
from . import linalg

aten = torch.ops.aten


@lowers(aten.geqrf.default)
def geqrf(x: Array) -> tuple[Array, Array]:
    """R on and above the diagonal, the reflections' vectors below it, and their factors tau."""
    reflections, tau = jnp.linalg.qr(x, mode="raw")
    return linalg.transpose(reflections), tau


@lowers(aten.linalg_householder_product.default)
def linalg_householder_product(reflections: Array, tau: Array) -> Array:
    return lax.linalg.householder_product(reflections, tau)


@lowers(aten.ormqr.default)
def ormqr(reflections: Array, tau: Array, x: Array, left: bool = True, transpose: bool = False) -> Array:
    """Q x, or x Q, Q being the square product of the reflections, or its adjoint."""
    return lax.linalg.ormqr(reflections, tau, x, left=left, transpose=transpose)


@lowers(aten.linalg_qr.default)
def linalg_qr(x: Array, mode: str = "reduced", *, ctx: Context) -> tuple[Array, Array]:
    """In mode "r", Q is an empty vector."""
    q, r = lax.linalg.qr(x, full_matrices=mode == "complete")
    return lax.full((0,), 0, x.dtype) if mode == "r" else q, r
