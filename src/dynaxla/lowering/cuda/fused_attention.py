"""Custom calls of cuDNN's flash attention, which computes the scores block by block and never stores all of them.

XLA's compiler for CUDA accepts these custom calls, plans the kernels, and fails if cuDNN has none, as for an older cuDNN or device. The
configuration of a call is a message of XLA's xla/service/gpu/backend_configs.proto, as JSON: `GpuBackendConfig` with a
`CudnnfMHABackendConfig`. These fields are written: `fmha_scale`; `mask_type` (causal is aligned to the top left); `dropout_rate` and `seed`
(no dropout); `intermediate_tensor_shape` (of the scores); the dimension numbers of the forward or backward products; and the fields that
select the flash algorithm of cuDNN's frontend. XLA itself sets `force_deterministic` for gradients, if the program's options ask for
determinism (engine/options.py).

Source: openxla/xla, xla/backends/gpu/transforms/cudnn_custom_call_compiler.cc; jax/_src/cudnn/fused_attention_stablehlo.py writes the
same calls
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from ...runtime import private
from .. import dtypes
from ..dtypes import DType
from ..promotion import convert, expand

# Releases of JAX that write the same configuration as this module. tests/lowering/cuda/test_fused_attention.py compares with the installed
# release.
_KNOWN_RELEASES = ((0, 10), (0, 11), (0, 12))

_FORWARD = {False: "__cudnn$fmhaSoftmax", True: "__cudnn$fmhaScaleBiasSoftmax"}
_BACKWARD = {False: "__cudnn$fmhaSoftmaxBackward", True: "__cudnn$fmhaScaleBiasSoftmaxBackward"}

# XLA's names of the supported dtypes.
_ELEMENT_TYPES = {"bfloat16": "BF16", "float16": "F16"}

# Memory orders of (batch, heads, rows, size). With HEADS_INSIDE, the heads of a row are adjacent, as in the result of a linear layer.
HEADS_INSIDE = (0, 2, 1, 3)
_HEADS_OUTSIDE = (0, 1, 2, 3)

# On all devices of compute capability 8 and later, cuDNN has forward and backward kernels for head sizes up to _LARGEST_SIZE that are
# multiples of _SIZE_MULTIPLE.
_LARGEST_SIZE = 128
_SIZE_MULTIPLE = 8


def is_known() -> bool:
    """True if this jaxlib is known to interpret the calls of this module correctly."""
    return private.release(private.jaxlib_version()) in _KNOWN_RELEASES


def supports(dtype: DType, size: int) -> bool:
    """True if cuDNN has kernels for heads of this dtype and size."""
    return dtype.name in _ELEMENT_TYPES and size % _SIZE_MULTIPLE == 0 and 0 < size <= _LARGEST_SIZE


@dataclass(frozen=True)
class AttentionSettings:
    """The settings of an attention call.

    Attributes:
        scale: The factor of the scores, before a bias is added.
        is_causal: True if row i attends to columns 0 to i only.
        heads_inside: True to read and write the memory order HEADS_INSIDE, which avoids copies if operands and results have this order.
    """

    scale: float
    is_causal: bool
    heads_inside: bool

    @property
    def order(self) -> tuple[int, ...]:
        return HEADS_INSIDE if self.heads_inside else _HEADS_OUTSIDE


def forward(query: Array, key: Array, value: Array, mask: Array | None, settings: AttentionSettings) -> tuple[Array, Array]:
    """Returns the attention output, and the log-sum-exp of each row of scores. Both are zero in a row that the mask hides completely.

    Shape:  query (batch, heads, rows, size), key and value (batch, key heads, columns, size), where heads is a multiple of key heads; mask
            (batch or 1, heads or 1, rows, columns). Results: that of query; (batch, heads, rows).
    Dtype:  query, key, value and the output have one dtype; the mask has this dtype or bool (True where a score counts); the log-sum-exp is
            float32.
    """
    bias = None if mask is None else _Bias.of(mask, query.dtype)
    operands = [lax.transpose(x, settings.order) for x in (query, key, value)]
    if bias is not None:
        operands.append(bias.values)
    statistics = jax.ShapeDtypeStruct(query.shape[:3], np.float32)
    config = _config(query, key, settings, _FORWARD_PRODUCTS)
    out, logsumexp = _call(_FORWARD[bias is not None], config, operands, [query, statistics], settings)
    if bias is None:
        return out, logsumexp
    is_hidden = lax.broadcast_in_dim(bias.hidden_rows(logsumexp.shape), out.shape, (0, 1, 2))
    return lax.select(is_hidden, lax.full_like(out, 0), out), bias.unclamped(logsumexp)


def backward(
    grad: Array, query: Array, key: Array, value: Array, mask: Array | None, out: Array, logsumexp: Array, settings: AttentionSettings
) -> tuple[Array, Array, Array]:
    """Returns the gradients of query, key and value, each of its operand's shape and dtype.

    The order of additions can differ between calls. If the program's options ask for determinism, cuDNN uses other kernels, whose order is
    fixed.

    `out` and `logsumexp` are the results of `forward`; the other arguments are as for `forward`.
    """
    bias = None if mask is None else _Bias.of(mask, query.dtype)
    query_in, key_in, value_in, grad_in, out_in = (lax.transpose(x, settings.order) for x in (query, key, value, grad, out))
    if bias is None:
        operands = [query_in, key_in, value_in, logsumexp, grad_in, out_in]
    else:
        operands = [query_in, key_in, value_in, bias.clamped(logsumexp), grad_in, bias.values, out_in]
    config = _config(query, key, settings, _BACKWARD_PRODUCTS)
    grad_query, grad_key, grad_value = _call(_BACKWARD[bias is not None], config, operands, [query, key, value], settings)
    return grad_query, grad_key, grad_value


# The lowest mask values that are passed to the kernels, by dtype: the floor of finite values, and the replacement of -inf. If the largest
# value of a row is at the floor, scores with the replacement still get weight zero.
_FLOORS = {"bfloat16": (-(2.0**41), -(2.0**42)), "float16": (-(2.0**15), -65504.0)}


@dataclass(frozen=True)
class _Bias:
    """A mask in the form that the kernels need.

    The kernels add the mask to the scores. They return NaN if all mask values of a row are -inf or very low.

    Attributes:
        values: The mask. Finite values below `floor` are replaced by `floor`, and -inf by an even lower finite value.
        largest: The largest value of each row of the original mask, float32 (batch or 1, heads or 1, rows).
        floor: The lowest value of `values`, other than the replacement of -inf.
    """

    values: Array
    largest: Array
    floor: float

    @staticmethod
    def of(mask: Array, dtype: DType) -> _Bias:
        """Returns the bias for a mask of `forward`. `dtype` is that of the query."""
        if dtypes.is_bool(mask.dtype):
            mask = lax.select(mask, lax.full(mask.shape, 0, dtype), lax.full(mask.shape, -np.inf, dtype))
        floor, lowest = _FLOORS[dtype.name]
        hidden = lax.eq(mask, lax.full_like(mask, -np.inf))
        values = lax.select(hidden, lax.full_like(mask, lowest), lax.max(mask, lax.full_like(mask, floor)))
        return _Bias(values, convert(lax.reduce_max(mask, (3,)), np.dtype(np.float32)), floor)

    def hidden_rows(self, shape: Sequence[int]) -> Array:
        """Returns True for each row without a visible score, broadcast to `shape`, (batch, heads, rows)."""
        return expand(lax.eq(self.largest, lax.full_like(self.largest, -np.inf)), shape)

    def unclamped(self, logsumexp: Array) -> Array:
        """Converts the log-sum-exp for the clamped mask to the log-sum-exp for the original mask."""
        is_below, largest = self._rows_below_floor(logsumexp.shape)
        shifted = lax.add(lax.sub(logsumexp, lax.full_like(logsumexp, self.floor)), largest)
        corrected = lax.select(is_below, shifted, logsumexp)
        return lax.select(self.hidden_rows(logsumexp.shape), lax.full_like(corrected, 0), corrected)

    def clamped(self, logsumexp: Array) -> Array:
        """Converts the log-sum-exp for the original mask to the log-sum-exp for the clamped mask.

        Rows without a visible score keep zero, which gives weights of zero.
        """
        is_below, largest = self._rows_below_floor(logsumexp.shape)
        shifted = lax.add(lax.sub(logsumexp, largest), lax.full_like(logsumexp, self.floor))
        return lax.select(is_below, shifted, logsumexp)

    def _rows_below_floor(self, shape: Sequence[int]) -> tuple[Array, Array]:
        """Returns True for each row whose largest mask value is finite but below the floor; and each row's largest value."""
        largest = expand(self.largest, shape)
        is_below = lax.bitwise_and(lax.lt(largest, lax.full_like(largest, self.floor)), lax.bitwise_not(self.hidden_rows(shape)))
        return is_below, largest


# The operands of each product, and the contracted dimension. Letters denote dimensions: b batch, h heads, r rows, c columns, s size. With
# HEADS_INSIDE, operands (b, h, ..., s) are stored as (b, ..., h, s). The scores are always (b, h, r, c). The output and its gradient have
# the dimensions of the query, and the value has those of the key.
_SCORES = "bhrc"
_QUERY, _KEY = "bhrs", "bhcs"

_FORWARD_PRODUCTS = {
    "bmm1": (_QUERY, _KEY, "s"),
    "bmm2": (_SCORES, _KEY, "c"),
}
_BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1": (_SCORES, _QUERY, "r"),
    "bmm1_grad_gemm2": (_SCORES, _KEY, "c"),
    "bmm2_grad_gemm1": (_SCORES, _QUERY, "r"),
    "bmm2_grad_gemm2": (_QUERY, _KEY, "s"),
}


def _config(query: Array, key: Array, settings: AttentionSettings, products: dict[str, tuple[str, str, str]]) -> dict[str, Any]:
    """Returns the configuration of a call.

    Args:
        products: For each product that the kernel computes, the dimensions of both operands, and the contracted dimension.
    """

    def stored(letters: str) -> str:
        """Returns the dimensions of an operand in memory order."""
        return letters if letters == _SCORES else "".join(letters[dim] for dim in settings.order)

    def dimension_numbers(x: str, y: str, contracted: str) -> dict[str, list[str]]:
        x, y = stored(x), stored(y)
        return {
            "lhs_contracting_dimensions": [str(x.index(contracted))],
            "rhs_contracting_dimensions": [str(y.index(contracted))],
            "lhs_batch_dimensions": [str(x.index(letter)) for letter in "bh"],
            "rhs_batch_dimensions": [str(y.index(letter)) for letter in "bh"],
        }

    attention = {
        "algorithm": {"math_type": "TENSOR_OP_MATH", "tuning_knobs": {"17": "1", "24": "0"}, "is_cudnn_frontend": True},
        "is_flash_attention": True,
        "fmha_scale": settings.scale,
        "mask_type": "CAUSAL" if settings.is_causal else "NO_MASK",
        "dropout_rate": 0.0,
        "seed": "42",
        "max_seg_per_batch": 1,
        "intermediate_tensor_shape": {
            "element_type": _ELEMENT_TYPES[query.dtype.name],
            "dimensions": [str(size) for size in (*query.shape[:3], key.shape[2])],
            "is_dynamic_dimension": [False] * 4,
            "layout": {"minor_to_major": ["3", "2", "1", "0"]},
        },
        **{f"{name}_dot_dimension_numbers": dimension_numbers(*product) for name, product in products.items()},
    }
    return {"cudnn_fmha_backend_config": attention}


def _call(
    target: str,
    config: dict[str, Any],
    operands: Sequence[Array],
    results: Sequence[Array | jax.ShapeDtypeStruct],
    settings: AttentionSettings,
) -> Sequence[Array]:
    """Returns the results of a call.

    The last output of the call is a workspace, whose size XLA gets from cuDNN.

    Args:
        results: The shapes and dtypes of the results, (batch, heads, ...). Results of rank 4 have the settings' memory order.
    """
    call = jax.ffi.ffi_call(
        target,
        [*(jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results), jax.ShapeDtypeStruct((0,), np.uint8)],
        vmap_method="sequential",
        output_layouts=[*(settings.order if len(result.shape) == 4 else None for result in results), None],
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(config),
    )
    *outputs, _workspace = call(*operands)
    return outputs
