"""Tests of products, norms, attention, embeddings and losses with rounded sizes. The padding contains NaN and invalid indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import assert_equal
from support.comparisons.rounded_sizes import SIZES, assert_one_program, compiled, counts, features, poisoned
from support.releases import IS_OLDEST, fails_in_oldest

pytestmark = pytest.mark.usefixtures("quick_xla")

KERNEL = torch.nn.Parameter(torch.ones(2, 4, 1), requires_grad=False)

aten = torch.ops.aten
Functions = list[Callable[..., Any]]

READS: Functions = [
    lambda x, y, n, t: F.embedding(n, t),
    lambda x, y, n, t: t[n],
    lambda x, y, n, t: y.gather(1, n),
    lambda x, y, n, t: x[:, n[0]],
    lambda x, y, n, t: x[n[:, 0] % 5, n[:, 1]].sum(0),
    lambda x, y, n, t: x[:, -n[0] - 1],
    lambda x, y, n, t: x.index_select(1, n[1]),
    lambda x, y, n, t: F.one_hot(n, 7).sum(1),
    lambda x, y, n, t: (100 // (n + 1)).sum(),
    lambda x, y, n, t: F.nll_loss(y[:, :7].log_softmax(1), n[:, 0]),
    lambda x, y, n, t: F.cross_entropy(x.reshape(-1, 4), n.reshape(-1) % 4),
    lambda x, y, n, t: F.cross_entropy(x.reshape(-1, 4), n.reshape(-1) % 4, reduction="none"),
]

PRODUCTS: Functions = [
    lambda x, y, n, t: x.transpose(1, 2) @ x,
    lambda x, y, n, t: y.t() @ y,
    lambda x, y, n, t: x @ t.t(),
    lambda x, y, n, t: F.linear(x, t, t[:, 0]),
    lambda x, y, n, t: y @ y[0],
    lambda x, y, n, t: y[0] @ y[1],
    lambda x, y, n, t: torch.ones_like(y).t() @ y,
    lambda x, y, n, t: torch.einsum("bsf,bs->bf", x, y),
    lambda x, y, n, t: F.layer_norm(x, [4], t[0], t[1]),
    lambda x, y, n, t: F.scaled_dot_product_attention(*(x.reshape(*x.shape[:2], 2, 2).transpose(1, 2),) * 3),
    lambda x, y, n, t: F.scaled_dot_product_attention(*(x.unsqueeze(1),) * 3, is_causal=True),
    lambda x, y, n, t: F.scaled_dot_product_attention(x[:, None, -2:], x[:, None], x[:, None], attn_mask=(n > 2)[:, None, None]),
    lambda x, y, n, t: F.gelu(x).softmax(1).sum(0),
    lambda x, y, n, t: F.binary_cross_entropy(y.sigmoid(), n / 7),
    lambda x, y, n, t: F.binary_cross_entropy(x.sigmoid(), x.sigmoid(), reduction="sum"),
    lambda x, y, n, t: F.conv1d(x[:, :3].transpose(1, 2), KERNEL),
    lambda x, y, n, t: aten.convolution_backward(x[:, :2, :3], x[:, 1:5, :3], KERNEL, [2], [1], [0], [1], False, [0], 1, [True] * 3)[1],
    lambda x, y, n, t: aten.convolution_backward(x[:, :2, :3], x[:, 1:5, :3], KERNEL, [2], [1], [0], [1], False, [0], 1, [True] * 3)[0],
    lambda x, y, n, t: F.max_pool2d(x[:, None, :4], 2),
]
if not IS_OLDEST:  # its fake tensors refuse a weight of a dynamic size
    PRODUCTS += [
        lambda x, y, n, t: F.binary_cross_entropy(y.sigmoid().half(), (n / 7).half(), y[0].abs().half()),
        lambda x, y, n, t: F.binary_cross_entropy(y.sigmoid(), n / 7, y[0], reduction="none").sum(1),
    ]

ENCODERS = [
    torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, norm_first=first).eval().requires_grad_(False) for first in (False, True)
]
ATTENTION = torch.nn.MultiheadAttention(4, 2, batch_first=True).eval().requires_grad_(False)

# torch's fused layers, in inference.
FUSED: Functions = [
    lambda x, y, n, t: ENCODERS[0](x),
    lambda x, y, n, t: ENCODERS[1](x),
    lambda x, y, n, t: ENCODERS[0](x, src_key_padding_mask=(n > 4) & (n[:1] > 1)),
    lambda x, y, n, t: ENCODERS[1](x, src_mask=torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)),
    lambda x, y, n, t: ATTENTION(x, x, x)[0],
    lambda x, y, n, t: ATTENTION(x, x, x)[1],
    lambda x, y, n, t: ATTENTION(x, x, x, average_attn_weights=False)[1],
    lambda x, y, n, t: ATTENTION(x[:, :3], x, x, need_weights=False)[0],
]


@pytest.mark.quick
def test_invalid_indices_in_padding_read_nothing() -> None:
    assert_one_program(READS, features)


@pytest.mark.quick
def test_products_norms_and_losses_ignore_padding() -> None:
    assert_one_program(PRODUCTS, features)


def test_gradients_with_batch_and_heads_merged() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        heads = x.reshape(x.shape[0], -1, 2, 2).transpose(1, 2)
        return (heads @ heads.transpose(2, 3)).softmax(3).matmul(heads).exp().sum()

    run, before = compiled(function, dynamic=None), counts()
    with poisoned():
        for sizes in SIZES[:2]:
            x = torch.randn(*sizes, 4, dtype=torch.float64, requires_grad=True)
            torch._dynamo.mark_dynamic(x, [0, 1])
            assert_equal(*(torch.autograd.grad(each(x), x)[0] for each in (run, function)))
    assert counts() == (before[0] + 2, before[1])


def test_gradients_with_static_batch_and_length_merged() -> None:
    """The batch is 3, and only the length is dynamic: the forward graph saves tensors with a dimension of size 3 * length."""
    inner, outer = torch.nn.Linear(4, 5).double(), torch.nn.Linear(5, 2).double()

    def function(x: torch.Tensor) -> torch.Tensor:
        return outer(inner(x).tanh()).exp().sum()

    run, before = compiled(function, dynamic=None), counts()
    with poisoned():
        for _, length in SIZES[:2]:
            x = torch.randn(3, length, 4, dtype=torch.float64)
            torch._dynamo.mark_dynamic(x, 1)
            parameters = [*inner.parameters(), *outer.parameters()]
            for mine, theirs in zip(*(torch.autograd.grad(each(x), parameters) for each in (run, function)), strict=True):
                assert_equal(mine, theirs)
    assert counts() == (before[0] + 2, before[1])


@fails_in_oldest("its fake tensors cannot run fused encoder layers")
def test_fused_layers_do_not_attend_to_padding() -> None:
    assert_one_program(FUSED, features)


def test_gradients_of_products_of_half_types_over_the_first_dimension() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.tensordot(x, x, ([0], [0]))

    run, before = compiled(function), counts()
    for sizes in ((5, 10), (6, 11)):
        x = torch.randn(*sizes, 4, dtype=torch.bfloat16, requires_grad=True)
        expected = function(x)
        grad = torch.randn_like(expected)
        assert_equal(*(torch.autograd.grad(each(x), x, grad)[0] for each in (run, function)))
    assert counts() == (before[0] + 2, before[1])
