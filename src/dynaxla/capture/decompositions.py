"""The decompositions for AOTAutograd: torch's core decompositions of ops that have no lowering, and corrections of torch's behaviour.

A decomposition that returns NotImplemented leaves the op in the graph.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import core_aten_decompositions, decomposition_table
from torch._ops import OpOverload
from torch._prims_common import is_non_overlapping_and_dense_or_false, suggest_memory_format
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ..lowering import kernel_refusals
from ..lowering.ops.recurrent_cudnn import rnn_gradients
from ..lowering.registry import registry
from ..torch_ops import aten, prims, without_missing_ops
from . import symbolic_floats


def max_unpool2d(x: torch.Tensor, indices: torch.Tensor, output_size: list[int]) -> torch.Tensor:
    """Calls max_unpool3d on volumes of depth 1, and gives the result x's memory format.

    torch's fake implementation of max_unpool2d reports another memory format than eager mode has.
    """
    volume = aten.max_unpool3d(x.unsqueeze(-3), indices.unsqueeze(-3), [1, *output_size], [1, 1, 1], [0, 0, 0])
    return volume.squeeze(-3).contiguous(memory_format=suggest_memory_format(x))


def index_fill(x: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    """Fills a clone of x if x is not dense. As in eager mode, the result has the memory order of x's dimensions.

    torch's fake implementation keeps the memory order only if x is dense.
    """
    return NotImplemented if is_non_overlapping_and_dense_or_false(x) else torch.index_fill(x.clone(), dim, index, value)


def pow_scalar(base: Any, exponent: torch.Tensor) -> torch.Tensor:
    """Copies the exponent to contiguous memory, so that the result is contiguous for all strides of the exponent, as in eager mode."""
    if isinstance(base, torch.SymFloat):
        return symbolic_floats.DECOMPOSITIONS[aten.pow.Scalar](base, exponent.contiguous())
    return NotImplemented if exponent.is_contiguous() else torch.pow(base, exponent.contiguous())


def pixel_unshuffle(x: torch.Tensor, downscale_factor: int) -> torch.Tensor:
    """Returns a clone of x, with x's shape, if x has no elements, as eager mode does. Other calls are not decomposed."""
    return x.clone() if guard_or_false(x.numel() == 0) else NotImplemented


def _batch_norm_in_memory_format(op: OpOverload) -> Callable[..., Any]:
    """Returns a decomposition of a batch norm op that first converts x to the memory format that torch suggests.

    On the CPU, eager mode's result is contiguous or channels-last, for any memory order of x's dimensions.
    """

    def batch_norm(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        memory_format = suggest_memory_format(x)
        if x.device.type != "cpu" or x.is_contiguous(memory_format=memory_format):
            return NotImplemented
        # `suggest_memory_format` reads the strides of dimensions of size 1, `is_contiguous` does not: x can be channels-last although torch
        # suggests another format.
        channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.ndim)
        if channels_last is not None and x.is_contiguous(memory_format=channels_last):
            return NotImplemented
        return op(x.contiguous(memory_format=memory_format), *args, **kwargs)

    return batch_norm


def _loss_gradient(op: OpOverload) -> Callable[..., Any]:
    """Returns a decomposition of a loss's gradient that also accepts tensors without elements.

    torch's decompositions divide Python numbers by the number of elements, which fails for no elements.
    """

    def backward(grad: torch.Tensor, x: torch.Tensor, target: torch.Tensor, *args: Any) -> torch.Tensor:
        if guard_or_false(x.numel() == 0):
            return x - target
        gradient: torch.Tensor = decomposition_table[op](grad, x, target, *args)
        return gradient

    return backward


def repeat_interleave(repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    """Returns an empty index if `repeats` is empty, whatever `output_size` is, as eager mode does. Other calls are not decomposed."""
    return repeats.clone() if guard_or_false(repeats.numel() == 0) else NotImplemented


def multinomial(weights: torch.Tensor, num_samples: int, *_: Any, **__: Any) -> torch.Tensor:
    """Raises eager mode's error if `num_samples` is not positive. Other calls are not decomposed.

    The lowering cannot raise this error: the result of such a call has no elements, and a graph with only such results runs no program.
    """
    if guard_or_false(num_samples <= 0):
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    return NotImplemented


# torch's fake implementations of the FFT prims report contiguous results. The ATen ops report the strides of eager mode.


def fft_c2r(x: torch.Tensor, *, dim: list[int], last_dim_size: int) -> torch.Tensor:
    """Replaces prims.fft_c2r by the ATen op, without normalization."""
    return torch._fft_c2r(x, dim, 0, last_dim_size)


def fft_r2c(x: torch.Tensor, *, dim: list[int], onesided: bool) -> torch.Tensor:
    """Replaces prims.fft_r2c by the ATen op, without normalization."""
    return torch._fft_r2c(x, dim, 0, onesided)


def fft_c2c(x: torch.Tensor, *, dim: list[int], forward: bool) -> torch.Tensor:
    """Replaces prims.fft_c2c by the ATen op, without normalization."""
    return torch._fft_c2c(x, dim, 0, forward)


def _has_dropout(layers: int, dropout: float, train: bool) -> bool:
    """True if a recurrent network applies dropout between its layers."""
    return train and dropout > 0 and layers > 1


def cudnn_rnn(
    x: torch.Tensor, weight: list[torch.Tensor], weight_stride0: int, weight_buf: torch.Tensor | None, hx: torch.Tensor,
    cx: torch.Tensor | None, mode: int, hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool,
    bidirectional: bool, batch_sizes: list[int], dropout_state: torch.Tensor | None,
) -> Any:  # fmt: skip
    """Rewrites cuDNN's recurrent network for its lowering, which takes time as the first dimension and draws no random numbers.

    With `batch_first`, the result is a transposed view, as in eager mode. The dropout masks between layers are computed by native_dropout.
    The masks replace the argument `dropout_state`, and the result `reserve`, from which the backward pass reads the masks.
    """
    if batch_first and not batch_sizes:
        out, *rest = torch._cudnn_rnn(
            x.transpose(0, 1), weight, weight_stride0, weight_buf, hx, cx, mode, hidden_size, proj_size, num_layers, False, dropout, train,
            bidirectional, batch_sizes, dropout_state,
        )  # fmt: skip
        return out.transpose(0, 1), *rest
    has_masks = dropout_state is not None and dropout_state.dtype == torch.bool
    if has_masks or not _has_dropout(num_layers, dropout, train):
        return NotImplemented
    steps, batch = (len(batch_sizes), batch_sizes[0]) if batch_sizes else x.shape[:2]
    width = (proj_size or hidden_size) * (2 if bidirectional else 1)
    masks = torch.native_dropout(x.new_ones((num_layers - 1, steps, batch, width)), dropout, True)[1]
    *results, _, weight_buf = torch._cudnn_rnn(
        x, weight, weight_stride0, weight_buf, hx, cx, mode, hidden_size, proj_size, num_layers, batch_first, dropout, train, bidirectional,
        batch_sizes, masks,
    )  # fmt: skip
    return *results, masks, weight_buf


def cudnn_rnn_backward(
    x: torch.Tensor, weight: list[torch.Tensor], weight_stride0: int, weight_buf: torch.Tensor, hx: torch.Tensor, cx: torch.Tensor | None,
    output: torch.Tensor, grad_output: torch.Tensor | None, grad_hy: torch.Tensor | None, grad_cy: torch.Tensor | None, mode: int,
    hidden_size: int, proj_size: int, num_layers: int, batch_first: bool, dropout: float, train: bool, bidirectional: bool,
    batch_sizes: list[int], dropout_state: torch.Tensor | None, reserve: torch.Tensor, output_mask: list[bool],
) -> Any:  # fmt: skip
    """Computes the gradients with `rnn_gradients`: torch has no fake implementation of this op, so no graph can contain it."""
    masks = reserve if _has_dropout(num_layers, dropout, train) else None
    grad_x, grad_hx, *rest = rnn_gradients(
        x, weight, weight_stride0, hx, cx, grad_output, grad_hy, grad_cy, mode, hidden_size, proj_size, num_layers, batch_first,
        bidirectional, batch_sizes, dropout, masks,
    )  # fmt: skip
    grad_cx = rest.pop(0) if cx is not None else None
    gradients = [grad if is_needed else None for grad, is_needed in zip((grad_x, grad_hx, grad_cx), output_mask, strict=False)]
    return *gradients, rest if output_mask[3] else []


# Decompositions of ops whose fake implementation in torch is missing, or has other shapes, strides or errors than eager mode.
_CORRECTED: dict[OpOverload, Callable[..., Any]] = {
    **{
        op: _batch_norm_in_memory_format(op)
        for op in (
            aten._batch_norm_with_update_functional.default,
            aten._native_batch_norm_legit.no_stats,
            aten._native_batch_norm_legit_functional.default,
            aten._native_batch_norm_legit_no_training.default,
        )
    },
    **{
        op: _loss_gradient(op)
        for op in (aten.huber_loss_backward.default, aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default)
    },
    aten._cudnn_rnn.default: cudnn_rnn,
    aten._cudnn_rnn_backward.default: cudnn_rnn_backward,
    aten.index_fill.int_Scalar: index_fill,
    aten.index_fill.int_Tensor: index_fill,
    aten.max_unpool2d.default: max_unpool2d,
    aten.multinomial.default: multinomial,
    aten.pixel_unshuffle.default: pixel_unshuffle,
    aten.pow.Scalar: pow_scalar,
    aten.repeat_interleave.Tensor: repeat_interleave,
    prims.fft_c2c.default: fft_c2c,
    prims.fft_c2r.default: fft_c2r,
    prims.fft_r2c.default: fft_r2c,
}


# Ops of PT2E quantization. The kernel of each op is a Python function of the same name that calls ATen ops. The other ops of the namespace
# are not decomposed, because their kernels read numbers from tensors.
_QUANTIZATION_OPS = (
    "quantize_per_tensor", "dequantize_per_tensor", "quantize_per_channel", "dequantize_per_channel", "choose_qparams_per_token",
    "choose_qparams_per_token_asymmetric", "quantize_per_token", "dequantize_per_token", "dequantize_per_channel_group",
)  # fmt: skip


def decompositions(platform: str) -> dict[OpOverload, Callable[..., Any]]:
    """Returns AOTAutograd's decompositions by op, as a dict that the caller may change.

    The dict has the ops without a lowering on this platform, and the ops whose traced behaviour must be corrected.
    """
    return _cached_decompositions(platform, len(registry)) | _quantization_decompositions()


def _quantization_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Returns the kernels of PT2E quantization's ops as decompositions. Empty if torch's module of these ops has not been imported."""
    module = sys.modules.get("torch.ao.quantization.fx._decomposed")
    names = [name for name in _QUANTIZATION_OPS if hasattr(module, name)]
    kernels = {getattr(torch.ops.quantized_decomposed, name).default: getattr(module, name) for name in names}
    return {op: kernel for op, kernel in kernels.items() if registry.find(op, "cpu") is None}


@functools.lru_cache(maxsize=4)
def _cached_decompositions(platform: str, lowering_count: int) -> dict[OpOverload, Callable[..., Any]]:
    """Returns the decompositions for a platform except those of quantization. Cached.

    lowering_count: the number of registered lowerings. It is only part of the cache key, so that a new lowering invalidates the cache.
    """
    core = {
        op: kernel_refusals.unless_refused(op, function) for op, function in _core_decompositions() if registry.find(op, platform) is None
    }
    return (
        core
        | symbolic_floats.DECOMPOSITIONS
        | {op: kernel_refusals.unless_refused(op, function) for op, function in without_missing_ops(_CORRECTED).items()}
    )


@functools.cache
def _core_decompositions() -> tuple[tuple[OpOverload, Callable[..., Any]], ...]:
    """Returns torch's core decompositions of op overloads. Cached, because torch takes tens of milliseconds to collect them.

    Composite ops that are defined after the first call need no entry: torch decomposes composite ops without a table.
    """
    return tuple((op, function) for op, function in core_aten_decompositions().items() if isinstance(op, OpOverload))
