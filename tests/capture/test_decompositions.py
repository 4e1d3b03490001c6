"""Tests of the decompositions: of ops without a lowering, and of ops for which torch's fake implementations are wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._decomp import core_aten_decompositions
from torch.nn import functional as F

from dynaxla.capture import decompositions as decompositions_module
from dynaxla.capture.decompositions import decompositions
from dynaxla.lowering.registry import registry
from support import internals
from support.comparisons.compare import assert_equal, check

aten = torch.ops.aten


def test_each_core_op_is_lowered_or_decomposed() -> None:
    # torch registers some decompositions when an op is first used, so these caches may be older than the list below.
    decompositions_module._core_decompositions.cache_clear()
    decompositions_module._cached_decompositions.cache_clear()
    table = decompositions("cpu")
    core = {op for op in core_aten_decompositions() if isinstance(op, torch._ops.OpOverload)}
    lowered = {op for op in core if registry.find(op, "cpu") is not None}
    assert len(lowered) > 100, "most core ops have a lowering, and are not decomposed"
    assert core - lowered - table.keys() == set()
    lowered_and_decomposed = lowered & table.keys()
    assert all(table[op] is not core_aten_decompositions()[op] for op in lowered_and_decomposed), (
        "torch's decompositions are used only for ops without a lowering"
    )


def test_decompositions_returns_a_copy_that_reflects_new_lowerings(monkeypatch: pytest.MonkeyPatch) -> None:
    first = decompositions("cpu")
    first.clear()
    assert decompositions("cpu")
    op = aten.hardswish.default
    empty = internals.empty_registry(monkeypatch)
    assert op in decompositions("cpu")
    empty.register(op, lambda x: x)
    assert op not in decompositions("cpu")


GAPPED = torch.arange(48.0).view(2, 4, 6)[:, :, ::2]
# Ops whose fake implementation in torch gives wrong strides or sizes.
CORRECTED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "index_fill of a tensor with gaps": (
        lambda x, i: (x.index_fill(1, i, 7.0), x.mT.index_fill(0, i[:1], 7.0)),
        (GAPPED, torch.tensor([0, 2])),
    ),
    "index_fill with a tensor": (lambda x, i, y: x.mT.index_fill(1, i, y), (GAPPED, torch.tensor([0, 2]), torch.tensor(3.0))),
    "pow of a number": (lambda x: (torch.pow(2, x.mT), torch.pow(2.5, x), torch.pow(2, x.contiguous())), (GAPPED / 48,)),
    "pixel_unshuffle of an empty tensor": (lambda x: F.pixel_unshuffle(x, 2), (torch.zeros(0, 1, 4, 4),)),
    "repeat_interleave of an empty tensor": (lambda x: torch.repeat_interleave(x, output_size=3), (torch.zeros(0, dtype=torch.int64),)),
    "batch_norm": (
        lambda x, m, v: (
            *(F.batch_norm(x.transpose(1, 2), m, v, training=training) for training in (True, False)),
            F.batch_norm(x.transpose(1, 2), None, None, training=True),
        ),
        (torch.arange(24.0).view(2, 4, 3) % 5, torch.zeros(3), torch.ones(3)),
    ),
    "batch_norm of ambiguous memory formats": (
        lambda x, m, v: (
            *(F.batch_norm(y, m, v, training=training) for y in (x, x.mT) for training in (True, False)),
            F.batch_norm(x[:1].unsqueeze(-1), m, v, training=True),
        ),
        ((torch.arange(24.0) % 5).as_strided((2, 3, 4, 1), (12, 1, 3, 1)), torch.zeros(3), torch.ones(3)),
    ),
    "max_unpool2d, channels last": (
        lambda x, i: F.max_unpool2d(x, i, 2),
        (
            torch.ones(1, 2, 2, 2).contiguous(memory_format=torch.channels_last),
            torch.tensor([0, 3, 8, 14]).view(1, 1, 2, 2).expand(1, 2, 2, 2).contiguous(memory_format=torch.channels_last),
        ),
    ),
}


@pytest.mark.parametrize("name", CORRECTED)
def test_results_despite_wrong_fake_implementations(name: str) -> None:
    function, inputs = CORRECTED[name]
    check(function, *inputs, calls=1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_losses_of_empty_batches(dynamic: bool) -> None:
    """The losses are nan, and their gradients are empty."""
    for loss in (F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.l1_loss):
        torch._dynamo.reset()
        compiled = torch.compile(loss, backend="dynaxla", dynamic=dynamic)
        for count in (0, 2):
            x, y = torch.zeros(count, 3, requires_grad=True), torch.ones(count, 3)
            value = compiled(x, y)
            (gradient,) = torch.autograd.grad(value, x)
            assert_equal(value.detach(), loss(x, y).detach())
            assert_equal(gradient, torch.autograd.grad(loss(x, y), x)[0])


def test_multinomial_of_zero_samples_raises_as_in_eager_mode() -> None:
    weights = torch.ones(3)
    for function in (torch.multinomial, torch.compile(torch.multinomial, backend="dynaxla", fullgraph=True)):
        with pytest.raises(RuntimeError, match="n_sample <= 0"):
            function(weights, 0)


def test_ops_of_pt2e_quantization() -> None:
    from torch.ao.quantization.fx import _decomposed

    assert _decomposed
    q = torch.ops.quantized_decomposed

    def function(x, w, scales, zeros):
        limits = -128, 127, torch.int8
        scale, zero = q.choose_qparams_per_token_asymmetric(x, torch.int8)
        rows = q.dequantize_per_token(q.quantize_per_token(x, scale, zero, *limits), scale, zero, *limits, x.dtype)
        products = q.quantize_per_tensor(rows @ q.dequantize_per_channel(w, scales, zeros, 0, *limits).t(), 0.5, 3, *limits)
        return q.dequantize_per_tensor(products, 0.5, 3, *limits), q.quantize_per_channel(x, scales[:2], zeros[:2], 0, *limits)

    w = torch.randint(-128, 128, (6, 8), dtype=torch.int8)
    check(function, torch.randn(2, 8), w, torch.rand(6), torch.randint(-3, 3, (6,)))


def test_per_channel_group_ops_of_pt2e_quantization() -> None:
    from torch.ao.quantization.fx import _decomposed

    assert _decomposed
    q = torch.ops.quantized_decomposed

    def function(x, scales, zeros):
        quantized = q.quantize_per_channel_group(x, scales, zeros, -8, 7, torch.int8, 8)
        return quantized, q.dequantize_per_channel_group(quantized, scales, zeros, -8, 7, torch.int8, 8, torch.float32)

    inputs = torch.randn(4, 16), torch.rand(4, 2) + 0.1, torch.zeros(4, 2, dtype=torch.int32)
    for mine, theirs in zip(torch.compile(function, backend="dynaxla", fullgraph=True)(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(mine, theirs)
