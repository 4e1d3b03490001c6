"""Scaled dot product attention, by each of its ops."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients
from support.comparisons.single_op import run_op
from support.releases import cases

aten = torch.ops.aten
ATTENTION = F.scaled_dot_product_attention
SUMS = {torch.float16: (1e-2, 5e-3), torch.bfloat16: (5e-2, 3e-2), torch.float32: (1e-4, 1e-5)}


def heads(rows: int = 5, columns: int = 7, size: int = 8, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(2, 4, n, size).to(dtype) for n in (rows, columns, columns)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    def function(q, k, v):
        return ATTENTION(q, k, v), ATTENTION(q, k, v, is_causal=True), ATTENTION(q, k, v, scale=0.3)

    check_gradients(function, *heads(dtype=dtype), tolerance=SUMS.get(dtype))


def test_masks() -> None:
    mask = torch.randn(5, 7)
    mask[0] = -float("inf")
    mask[1, :4] = -float("inf")

    def function(q, k, v, mask, per_column):
        return (
            ATTENTION(q, k, v, attn_mask=mask),
            ATTENTION(q, k, v, attn_mask=mask > 0),
            ATTENTION(q, k, v, attn_mask=per_column),
            ATTENTION(q, k, v, attn_mask=per_column > 0.2),
        )

    check_gradients(function, *heads(), constants=[mask, torch.rand(2, 1, 1, 7)], tolerance=SUMS[torch.float32])


def test_shapes() -> None:
    def function(q, k, v):
        return (
            ATTENTION(q[:, :, :3], k, v, is_causal=True),
            ATTENTION(q, k[:, :, :2], v[:, :, :2], is_causal=True),
            ATTENTION(q[0], k[0], v[0]),
            ATTENTION(q[0, 0], k[0, 0], v[0, 0]),
            ATTENTION(q, k, v[..., :6]),
            ATTENTION(q, k[:, :2], v[:, :2], enable_gqa=True),
            ATTENTION(q.transpose(1, 2), k.transpose(1, 2)[:, :, :4], v.transpose(1, 2)[:, :, :4]),
        )

    check_gradients(function, *heads(7, 7), tolerance=SUMS[torch.float32])


def test_grouped_query_attention() -> None:
    def function(q, k, v, mask):
        return (
            ATTENTION(q, k, v, enable_gqa=True),
            ATTENTION(q, k, v, is_causal=True, enable_gqa=True),
            ATTENTION(q, k, v, attn_mask=mask, enable_gqa=True),
        )

    q, k, v = torch.randn(2, 6, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 8)
    check_gradients(function, q, k, v, constants=[torch.randn(5, 7)], tolerance=SUMS[torch.float32])


def test_module_with_gradients() -> None:
    attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    check_gradients(lambda x: attention(x, x, x, need_weights=False)[0], torch.randn(2, 5, 8), tolerance=SUMS[torch.float32])


def test_log_sum_exp_and_infinite_rows() -> None:
    q, k, v = heads()
    mask = torch.zeros(5, 7)
    mask[1], mask[2, 3] = -float("inf"), -float("inf")
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    out, logsumexp = run_op(op, q, k, v, attn_mask=mask)
    expected, expected_logsumexp = op(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(logsumexp, expected_logsumexp)


def test_generator_is_unchanged_without_dropout() -> None:
    compiled = torch.compile(ATTENTION, backend="dynaxla")
    state = torch.get_rng_state()
    compiled(*(torch.ones(1, 1, 2, 4),) * 3)
    assert torch.equal(torch.get_rng_state(), state)


# --- ops whose kernels exist on CUDA only: their lowerings run anywhere


def reference(q, k, v, mask=None, is_causal=False, scale=None):
    """(output, log-sum-exp) by definition, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        scores = scores + mask
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -float("inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


FORWARDS = {
    "efficient": (aten._scaled_dot_product_efficient_attention.default, (None, True)),
    "cudnn": (aten._scaled_dot_product_cudnn_attention.default, (None, True)),
    "flash": (aten._scaled_dot_product_flash_attention.default, ()),
    "overrideable": (aten._scaled_dot_product_fused_attention_overrideable.default, (None,)),
}

KERNELS = cases(FORWARDS, {"overrideable": "its gradient has no shape function"})


def backward(kernel, grad, q, k, v, results, dropout_p, is_causal, bias=None, scale=None):
    out, logsumexp, *rest = results
    if kernel == "efficient":
        seed, offset = rest
        op, args = aten._scaled_dot_product_efficient_attention_backward.default, (bias, out, logsumexp, seed, offset, dropout_p)
        return run_op(op, grad, q, k, v, *args, [True, True, True, bias is not None], is_causal, scale=scale)
    cum_q, cum_k, max_q, max_k, seed, offset, _ = rest
    counts = (cum_q, cum_k, max_q, max_k)
    if kernel == "flash":
        op, args = aten._scaled_dot_product_flash_attention_backward.default, (out, logsumexp, *counts, dropout_p, is_causal, seed, offset)
    elif kernel == "cudnn":
        op = aten._scaled_dot_product_cudnn_attention_backward.default
        args = (out, logsumexp, seed, offset, bias, *counts, dropout_p, is_causal)
    else:
        op = aten._scaled_dot_product_fused_attention_overrideable_backward.default
        args = (bias, [True, True, True, bias is not None], out, logsumexp, *counts, dropout_p, is_causal, seed, offset)
    return run_op(op, grad, q, k, v, *args, scale=scale)


@pytest.mark.parametrize("kernel", KERNELS)
def test_cuda_kernels(kernel: str) -> None:
    op, extra = FORWARDS[kernel]
    q, k, v = heads(7, 7)
    results = run_op(op, q, k, v, *extra, 0.0, True, scale=0.4)
    expected, expected_logsumexp = reference(q, k, v, is_causal=True, scale=0.4)
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(results[1].reshape(2, 4, -1)[:, :, :7].double(), expected_logsumexp, rtol=1e-4, atol=1e-5)

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    grad = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(reference(*leaves, is_causal=True, scale=0.4)[0], leaves, grad)
    grads = backward(kernel, grad.float(), q, k, v, results, 0.0, True, scale=0.4)
    for mine, theirs in zip(grads[:3], expected_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_cuda_kernel_with_bias() -> None:
    q, k, v = heads()
    bias = torch.randn(2, 1, 5, 7).expand(2, 4, 5, 7).contiguous()
    results = run_op(FORWARDS["efficient"][0], q, k, v, bias, True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    expected = reference(*leaves)[0]
    torch.testing.assert_close(results[0].double(), expected.detach(), rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(expected)
    grads = backward("efficient", grad.float(), q, k, v, results, 0.0, False, bias=bias)
    expected_grads = torch.autograd.grad(expected, leaves, grad)
    for mine, theirs in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    without_logsumexp = run_op(FORWARDS["efficient"][0], q, k, v, None, False)
    assert without_logsumexp[1].numel() == 0


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradient_has_the_same_dropout(kernel: str) -> None:
    op, extra = FORWARDS[kernel]
    q, k = torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 64, 8)
    v = torch.eye(64)[None, None, :, :8].contiguous()
    # With equal scores and unit vectors as values, the output consists of the weights: 0, or 1 / 64 / (1 - p).
    results = run_op(op, q, k, v, *extra, 0.5, False)
    kept = results[0] != 0
    assert torch.allclose(results[0][kept], torch.tensor(1 / 32))
    assert 0.3 < kept.double().mean() < 0.7
    grad = torch.ones_like(results[0])
    _, _, grad_value, *_ = backward(kernel, grad, q, k, v, results, 0.5, False)
    torch.testing.assert_close(grad_value[0, 0, :8, 0], kept[0, 0].sum(0) / 32)
    again = run_op(op, q, k, v, *extra, 0.5, False)
    assert not torch.equal(again[0], results[0])


@pytest.mark.quick
@pytest.mark.parametrize("is_causal", [False, True])
def test_row_whose_scores_overflow_is_zero(is_causal: bool) -> None:
    """All scores of the first row are -inf, without a mask."""
    q, k, v = torch.zeros(1, 1, 4, 8), torch.full((1, 1, 4, 8), 1e20), torch.randn(1, 1, 4, 8)
    q[0, 0, 0] = -1e20
    check(lambda q, k, v: ATTENTION(q, k, v, is_causal=is_causal), q, k, v)


@pytest.mark.quick
def test_large_scores_are_rounded_before_subtraction() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 16, 8, generator=generator) * scale for scale in (1e5, 1e5, 1))
    check(lambda q, k, v: ATTENTION(q, k, v), q, k, v)
