"""Fused kernels of attention modules and encoder layers, in inference."""

from __future__ import annotations

import math

import pytest
import torch

from support.comparisons.compare import check

aten = torch.ops.aten


MULTI_HEAD = {
    "no mask": (None, None),
    "rows and columns": (torch.ones(5, 5, dtype=torch.bool).triu(1), 0),
    "a hidden row": (torch.ones(5, 5, dtype=torch.bool).triu(), 0),
    "columns": (torch.tensor([[False] * 5, [False, False, True, True, True]]), 1),
    "full": (torch.zeros(2, 2, 5, 5).bernoulli(0.3) * -math.inf, 2),
}


@pytest.mark.parametrize("case", MULTI_HEAD)
def test_native_multi_head_attention(case: str) -> None:
    mask, mask_type = MULTI_HEAD[case]
    mask = None if mask is None else mask.nan_to_num(0.0, neginf=-1.0) if mask.is_floating_point() else mask

    def function(q, k, v, mask, *weights):
        def attend(*inputs, need_weights=True, average=True):
            results = aten._native_multi_head_attention(*inputs, 8, 2, *weights, mask, need_weights, average, mask_type)
            return results if need_weights else results[0]

        return attend(q, q, q), attend(q, k, v, average=False), attend(q, q, q, need_weights=False)

    weights = [torch.randn(24, 8) / 3, torch.randn(24), torch.randn(8, 8), torch.randn(8)]
    with torch.no_grad():
        check(function, *[torch.randn(2, 5, 8) for _ in range(3)], mask, *weights)


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_transformer_encoder_layer(norm_first: bool, activation: str) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first, activation=activation).eval()
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        check(lambda x, padding: (layer(x), layer(x, src_key_padding_mask=padding)), torch.randn(2, 5, 8), padding)
