"""Fused cells, which have kernels for GPUs alone, compared with the cells that torch composes on the CPU; and the CPU's fused layer."""

from __future__ import annotations

import pytest
import torch

from support.comparisons.compare import assert_equal
from support.comparisons.gradients import check_gradients
from support.comparisons.single_op import run_op

aten = torch.ops.aten
BATCH, HIDDEN = 3, 4


def differentiable(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def lstm(x: torch.Tensor, h: torch.Tensor, cx: torch.Tensor, *biases: torch.Tensor) -> tuple[torch.Tensor, ...]:
    gates = (x + h + sum(biases)).chunk(4, 1)
    activated = [gates[0].sigmoid(), gates[1].sigmoid(), gates[2].tanh(), gates[3].sigmoid()]
    cy = activated[1] * cx + activated[0] * activated[2]
    return activated[3] * cy.tanh(), cy, torch.cat(activated, 1)


def gru(x: torch.Tensor, h: torch.Tensor, hx: torch.Tensor, *biases: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, h = (x + biases[0], h + biases[1]) if biases else (x, h)
    (xr, xu, xn), (hr, hu, hn) = x.chunk(3, 1), h.chunk(3, 1)
    reset, update = (xr + hr).sigmoid(), (xu + hu).sigmoid()
    new = (xn + reset * hn).tanh()
    return new + update * (hx - new), torch.cat([reset, update, new, hx, hn], 1)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "has_bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_lstm_cell(dtype: torch.dtype, has_bias: bool) -> None:
    gates = [differentiable(BATCH, 4 * HIDDEN, dtype=dtype) for _ in range(2)]
    cx = differentiable(BATCH, HIDDEN, dtype=dtype)
    biases = [differentiable(4 * HIDDEN, dtype=dtype) for _ in range(2 * has_bias)]
    hy, cy, workspace = (result.detach() for result in lstm(*gates, cx, *biases))
    detached = [tensor.detach() for tensor in (*gates, cx, *biases)]
    assert_equal(run_op(aten._thnn_fused_lstm_cell.default, *detached, expected=(hy, cy, workspace)), (hy, cy, workspace))

    for is_used in ((True, True), (True, False), (False, True)):
        cotangents = [torch.randn_like(hy) if use else None for use in is_used]
        results = [result for result, use in zip(lstm(*gates, cx, *biases), is_used, strict=False) if use]
        upstream = [cotangent for cotangent in cotangents if cotangent is not None]
        grad_gates, grad_cx, *grad_bias = torch.autograd.grad(results, [gates[0], cx, *biases[:1]], upstream)
        expected = (grad_gates, grad_cx, grad_bias[0] if has_bias else None)
        op = aten._thnn_fused_lstm_cell_backward_impl.default
        assert_equal(run_op(op, *cotangents, cx.detach(), cy, workspace, has_bias, expected=expected), expected)


@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "has_bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gru_cell(dtype: torch.dtype, has_bias: bool) -> None:
    gates = [differentiable(BATCH, 3 * HIDDEN, dtype=dtype) for _ in range(2)]
    hx = differentiable(BATCH, HIDDEN, dtype=dtype)
    biases = [differentiable(3 * HIDDEN, dtype=dtype) for _ in range(2 * has_bias)]
    hy, workspace = (result.detach() for result in gru(*gates, hx, *biases))
    detached = [tensor.detach() for tensor in (*gates, hx, *biases)]
    assert_equal(run_op(aten._thnn_fused_gru_cell.default, *detached, expected=(hy, workspace)), (hy, workspace))

    cotangent = torch.randn_like(hy)
    gradients = torch.autograd.grad(gru(*gates, hx, *biases)[0], [*gates, hx, *biases], cotangent)
    expected = (*gradients, *[None] * (2 - len(biases)))
    assert_equal(run_op(aten._thnn_fused_gru_cell_backward.default, cotangent, workspace, has_bias, expected=expected), expected)


@pytest.mark.parametrize("reverse", [False, True], ids=["forwards", "backwards"])
def test_layer(reverse: bool) -> None:
    """The last result of mkldnn_rnn_layer, which oneDNN saves for mkldnn_rnn_layer_backward, is not compared."""
    sizes = [(5, BATCH, 2), (4 * HIDDEN, 2), (4 * HIDDEN, HIDDEN), (4 * HIDDEN,), (4 * HIDDEN,), (BATCH, HIDDEN), (BATCH, HIDDEN)]
    operands = [torch.randn(size) for size in sizes]

    def layer(*operands: torch.Tensor, train: bool = True) -> list[torch.Tensor]:
        return list(aten.mkldnn_rnn_layer(*operands, reverse, [], 2, HIDDEN, 1, True, False, False, train)[:3])

    results = run_op(aten.mkldnn_rnn_layer.default, *operands, reverse, [], 2, HIDDEN, 1, True, False, False, False)
    assert_equal(list(results[:3]), layer(*operands, train=False))
    check_gradients(layer, *operands)
