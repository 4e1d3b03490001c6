"""Ops that have the work of another one."""

from __future__ import annotations

import torch
from compare import check

aten = torch.ops.aten


def test_synonyms() -> None:
    def function(x, z):
        return (
            aten.detach_copy(x),
            aten._conj_copy(z),
            aten._neg_view_copy(x),
            aten._reshape_alias_copy(x.contiguous(), [2, 6], [6, 1]),
            aten.view_copy.dtype(x, torch.int32),
            aten.view_copy.dtype(x.contiguous(), torch.float16),
            aten._stack([x, x + 1], 1),
            aten._logcumsumexp(x, 1),
            aten._is_all_true(x > 0),
            aten._is_any_true(x[0, 0] > 9),
        )

    check(function, torch.randn(4, 3).t(), torch.randn(3, dtype=torch.complex64))
