"""Tests of attention by cuDNN on CUDA tensors: values, gradients and log-sum-exps agree with eager mode, without scores in memory."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from support import internals

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="needs an NVIDIA GPU of compute capability 8"
    ),
]

# Tolerance of errors relative to the largest result in float64: at most twice eager mode's error plus this.
ROUNDING = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


def heads(
    dtype: torch.dtype, rows: int = 128, columns: int = 128, size: int = 64, key_heads: int = 4, inside: bool = True
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(2, rows, 4, size), *[(2, columns, key_heads, size)] * 2]
    tensors = [torch.randn(shape, device="cuda", dtype=dtype).transpose(1, 2) for shape in shapes]
    return [x.detach().requires_grad_() if inside else x.contiguous().detach().requires_grad_() for x in tensors]


def results(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the function's result and its gradients."""
    out = function(*tensors)
    torch.manual_seed(1)
    return [out, *torch.autograd.grad(out, tensors, torch.randn(out.shape, device="cuda", dtype=torch.float64).to(out.dtype))]


def check(function: Callable[..., torch.Tensor], tensors: list[torch.Tensor], exact: Callable[..., torch.Tensor] | None = None) -> None:
    """Compares the errors with eager mode's. exact: the function for float64, if its mask must be converted."""
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    eager = results(function, tensors)
    with sdpa_kernel(SDPBackend.MATH):
        expected = results(exact or function, [x.detach().double().requires_grad_() for x in tensors])
    for mine, theirs, reference in zip(results(compiled, tensors), eager, expected, strict=True):
        largest = float(reference.detach().abs().max())
        error, usual = (float((x.detach().double() - reference.detach()).abs().max()) / largest for x in (mine, theirs))
        assert error <= 2 * usual + ROUNDING[mine.dtype]


# Each backend with each other setting at least once. Few combinations, because a case has three programs in float64 and six compiled ones.
SETTINGS = [
    (SDPBackend.FLASH_ATTENTION, torch.bfloat16, False, True),
    (SDPBackend.FLASH_ATTENTION, torch.float16, True, False),
    (SDPBackend.EFFICIENT_ATTENTION, torch.bfloat16, True, True),
    (SDPBackend.EFFICIENT_ATTENTION, torch.float16, False, False),
    (SDPBackend.CUDNN_ATTENTION, torch.bfloat16, True, False),
    (SDPBackend.CUDNN_ATTENTION, torch.float16, False, True),
]


@pytest.mark.parametrize(("rows", "columns", "size"), [(128, 128, 64), (129, 129, 128), (127, 65, 64), (64, 200, 40)])
@pytest.mark.parametrize(("backend", "dtype", "is_causal", "inside"), SETTINGS)
def test_lengths_and_sizes(
    backend: SDPBackend, dtype: torch.dtype, is_causal: bool, inside: bool, rows: int, columns: int, size: int
) -> None:
    if is_causal:
        columns = rows
    tensors = heads(dtype, rows, columns, size, inside=inside)
    with sdpa_kernel(backend):
        check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=0.2), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_grouped_heads(dtype: torch.dtype, is_causal: bool) -> None:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        for key_heads in (1, 2):
            tensors = heads(dtype, key_heads=key_heads)
            check(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True), tensors)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backend", [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION], ids=lambda backend: backend.name)
@pytest.mark.parametrize("kind", ["padding", "bool", "each head", "lowest"])
def test_masks(dtype: torch.dtype, backend: SDPBackend, kind: str) -> None:
    """Rows that are masked entirely are not compared: eager mode's kernels give different results."""
    torch.manual_seed(2)
    mask = torch.randn(2, 1, 128, 128, device="cuda")
    if kind == "padding":
        mask[0, ..., 100:] = -float("inf")
    elif kind == "each head":
        mask = torch.randn(2, 4, 128, 128, device="cuda")
    elif kind == "lowest":
        mask[0, ..., 100:] = torch.finfo(dtype).min
    narrow = mask > 0 if kind == "bool" else mask.to(dtype)

    def attention(mask: torch.Tensor) -> Callable[..., torch.Tensor]:
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    with sdpa_kernel(backend):
        check(attention(narrow), heads(dtype), attention(narrow if kind == "bool" else narrow.double()))


def test_row_that_is_masked_entirely_gives_zeros() -> None:
    mask = torch.zeros(2, 1, 128, 128, device="cuda", dtype=torch.bfloat16)
    mask[:, :, 3] = -float("inf")
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        compiled = torch.compile(lambda *args: F.scaled_dot_product_attention(*args, attn_mask=mask), backend="dynaxla", fullgraph=True)
        out, *grads = results(compiled, heads(torch.bfloat16))
    assert not out[:, :, 3].any()
    assert not grads[0][:, :, 3].any()
    assert all(x.isfinite().all() for x in (out, *grads))


@pytest.mark.parametrize("is_causal", [False, True])
def test_log_sum_exp(is_causal: bool) -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention.default
    tensors = [x.detach() for x in heads(torch.bfloat16, 128, 128)]
    compiled = torch.compile(lambda *args: op(*args, 0.0, is_causal)[:2], backend="dynaxla", fullgraph=True)
    torch.testing.assert_close(compiled(*tensors)[1], op(*tensors, 0.0, is_causal)[1], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("has_mask", [False, True])
def test_deterministic_gradients(has_mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks of keys add to each query's gradient. XLA requests a fixed order from cuDNN, or does not use cuDNN."""
    compiled = internals.compiled_programs(monkeypatch)
    tensors = heads(torch.bfloat16, 2048, 2048)
    mask = torch.randn(2, 1, 2048, 2048, device="cuda", dtype=torch.bfloat16) if has_mask else None
    torch.use_deterministic_algorithms(True)
    try:
        with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
            function = torch.compile(lambda *args: F.scaled_dot_product_attention(*args, attn_mask=mask), backend="dynaxla")
            first, *others = (results(function, tensors) for _ in range(6))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))
    text = compiled[-1].text()
    assert re.search(r'"force_deterministic":\s*true', text) or "SoftmaxBackward" not in text


def test_no_scores_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores of 8 by 16 heads with 4096 by 4096 elements would need 4 GiB in bfloat16."""
    compiled = internals.compiled_programs(monkeypatch)
    tensors = [torch.randn(8, 4096, 16, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for _ in range(3)]
    results(torch.compile(lambda *args: F.scaled_dot_product_attention(*args, is_causal=True), backend="dynaxla"), tensors)
    assert len(compiled) == 2
    assert all("__cudnn$fmhaSoftmax" in program.text() and "4096,4096]" not in program.text() for program in compiled)
