"""Elementwise arithmetic, comparisons and functions."""

from __future__ import annotations

import torch
from jax import lax

from ..promotion import Promotion
from ..registry import lower_table, lowers

aten = torch.ops.aten

lower_table(
    {
        aten.mul.Tensor: lax.mul,
        aten.relu.default: lambda x: lax.max(x, lax.full_like(x, 0)),
    },
    promote=Promotion.DEFAULT,
)
