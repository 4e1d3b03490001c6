"""Attention kernels for TPUs: values in Pallas's interpreter, and the programs that call the kernels."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import numpy as np
import pytest
import torch
from jax.experimental import pallas

from dynaxla.lowering import Interpreter
from dynaxla.lowering.function import Function
from dynaxla.lowering.implementations import RecordingChooser, choose_by_rules
from dynaxla.lowering.tpu import pallas_attention
from dynaxla.lowering.tpu.pallas_attention import KernelSettings
from support import internals
from support.comparisons.single_op import Call, graph_of

aten = torch.ops.aten
INFINITY = float("inf")


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pallas, "pallas_call", functools.partial(pallas.pallas_call, interpret=True))
    internals.blocks_of_pallas_attention(monkeypatch, 256, 128)


def heads(rows: int, columns: int, *, count: int = 2, key_heads: int = 2, size: int = 16, value_size: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = (2, count, rows, size), (2, key_heads, columns, size), (2, key_heads, columns, value_size), (2, count, rows, value_size)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def additive_mask(*shape: int) -> torch.Tensor:
    """An additive mask: -inf for some scores, for the whole third row, and for the first 150 columns of the fourth row."""
    mask = torch.randn(shape, dtype=torch.float64)
    mask[mask > 1] = -INFINITY
    if shape[2] > 3:
        mask[:, :, 2] = -INFINITY
        mask[:, :, 3, :150] = -INFINITY
    return mask


CASES: dict[str, tuple[list[torch.Tensor], torch.Tensor | None, bool]] = {
    "plain": (heads(256, 256), None, False),
    "lengths that are no multiple of a block": (heads(150, 300), None, False),
    "causal": (heads(300, 300), None, True),
    "causal with more columns": (heads(150, 500), None, True),
    "causal with more rows": (heads(500, 150), None, True),
    "grouped heads": (heads(300, 200, count=6), None, True),
    "value size": (heads(200, 200, value_size=24), None, False),
    "mask": (heads(200, 300, count=4), additive_mask(2, 4, 200, 300), False),
    "one mask for all": (heads(200, 300, count=4), additive_mask(1, 1, 200, 300), False),
    "one row of a mask": (heads(200, 300), additive_mask(2, 1, 1, 300), True),
    "bool mask": (heads(200, 300), additive_mask(2, 2, 200, 300) > -INFINITY, False),
}


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool) -> Any:
    """Returns the output and the log-sum-exps, computed by torch in float64."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = query @ key.mT * 0.3
    if mask is not None:
        scores = scores.masked_fill(~mask, -INFINITY) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[2:], dtype=torch.bool).triu(1), -INFINITY)
    empty = (scores == -INFINITY).all(3, keepdim=True)
    scores = scores.masked_fill(empty, 0)
    return scores.softmax(3).masked_fill(empty, 0) @ value, scores.logsumexp(3, keepdim=True).masked_fill(empty, 0)[..., 0]


@pytest.mark.parametrize("dtype", [np.float32, jax.numpy.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sample(usual=6)
def test_values(name: str, dtype: Any, interpreted: None) -> None:
    tensors, mask, is_causal = CASES[name]
    query, key, value, grad = (jax.numpy.asarray(x.numpy(), dtype) for x in tensors)
    wide_operands = [torch.from_numpy(np.array(x, np.float64)).requires_grad_() for x in (query, key, value)]
    out, logsumexp = reference(*wide_operands, mask, is_causal)
    wide_grad = torch.from_numpy(np.array(grad, np.float64))
    expected_grads = torch.autograd.grad(out, wide_operands, wide_grad)

    settings = KernelSettings(0.3, is_causal, jax.lax.Precision.HIGHEST)
    mask_array = None if mask is None else jax.numpy.asarray(mask.numpy(), None if mask.dtype == torch.bool else np.float32)
    with jax.enable_x64(True):
        outputs = pallas_attention.forward(query, key, value, mask_array, settings)
        grad_out_sums = jax.numpy.asarray((out * wide_grad).sum(3).detach().numpy(), np.float32)
        statistics = jax.numpy.asarray(logsumexp.detach().numpy(), np.float32)
        grads = pallas_attention.backward(grad, query, key, value, mask_array, statistics, grad_out_sums, settings)
    assert [x.dtype for x in (*outputs, *grads)] == [query.dtype, np.float32, *[query.dtype] * 3]
    tolerance = 2e-5 if dtype == np.float32 else 0.03
    for mine, theirs in zip((*outputs, *grads), (out, logsumexp, *expected_grads), strict=True):
        np.testing.assert_allclose(np.array(mine, np.float64), theirs.detach().numpy(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("length", "block"), [(1, 128), (128, 128), (200, 256), (384, 384), (512, 512), (1100, 384), (8192, 512)])
def test_size_of_blocks(length: int, block: int) -> None:
    assert pallas_attention._block(length) == block


# --- programs


def attention(rows: int, columns: int, *, count: int = 8, key_heads: int = 2, mask: bool = False, dropout_p: float = 0.0) -> list[Call]:
    """Calls of the fused op of the device "jax" and of its gradient."""
    shapes = (1, count, rows, 64), *[(1, key_heads, columns, 64)] * 2
    query, key, value = (torch.zeros((), dtype=torch.bfloat16).expand(shape) for shape in shapes)
    bias = torch.zeros(1, 1, rows, columns, dtype=torch.bfloat16) if mask else None
    is_causal, seed = not mask, torch.zeros((), dtype=torch.int64)
    logsumexp = torch.zeros(1, count, rows)
    rest = (query, logsumexp, None, None, rows, columns, dropout_p, is_causal, seed, seed)
    return [
        Call(aten._scaled_dot_product_fused_attention_overrideable.default, (query, key, value, bias, dropout_p, is_causal, False)),
        Call(
            aten._scaled_dot_product_fused_attention_overrideable_backward.default,
            (query, query, key, value, bias, [True, True, True, False], *rest),
        ),
    ]


def stablehlo(call: Call, choose: Any = choose_by_rules) -> str:
    with jax.enable_x64(True):
        module, tensors, _ = graph_of([call])
        function = Function(Interpreter(module, "tpu"), choose=choose)
        arrays = [jax.ShapeDtypeStruct(x.shape, str(x.dtype).removeprefix("torch.")) for x in tensors]
        draws = [jax.random.key(0)] if function.draws_random else []
        traced = jax.jit(lambda arrays, draws: function(arrays, *draws).outputs).trace(arrays, draws)
        return traced.lower(lowering_platforms=("tpu",)).as_text()


def calls_in(text: str) -> list[str]:
    return re.findall(r'kernel_name = "(\w+)"', text)


@pytest.mark.parametrize("mask", [False, True])
def test_programs_call_the_kernels(mask: bool) -> None:
    forward, backward = (stablehlo(call) for call in attention(2048, 2000, mask=mask))
    assert calls_in(forward) == ["forward_kernel"]
    assert calls_in(backward) == ["key_value_gradient_kernel", "query_gradient_kernel"]
    for text in (forward, backward):
        assert not re.search(r"2048x20\d\dxf32", text)


@pytest.mark.parametrize("call", attention(2048, 2048, dropout_p=0.1))
def test_dropout_is_computed_in_blocks(call: Call) -> None:
    text = stablehlo(call)
    assert not calls_in(text)
    assert "2048x2048" not in text


@pytest.mark.parametrize("call", attention(2048, 2048))
def test_scores_are_computed_in_blocks_without_the_kernels(call: Call) -> None:
    chooser = RecordingChooser(choose_by_rules)
    stablehlo(call, chooser)
    assert len(chooser.refusable) == 1
    chooser.avoids_refusable = True
    assert "2048x2048" not in stablehlo(call, chooser)


@pytest.mark.parametrize("call", [*attention(1, 4096), *attention(64, 64)])
def test_small_attention_uses_matrix_products(call: Call) -> None:
    assert not calls_in(stablehlo(call))
