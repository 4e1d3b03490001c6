"""oneDNN's convolution, matrix product and layer normalization, which XLA:CPU holds and runs as parts of its own programs.

On x86-64 jaxlib is built with oneDNN, but its compiler does not use it; a custom call to it in a program is understood all the same, and
runs on the program's own buffers and threads. The call's configuration is a message of XLA's xla/service/cpu/onednn_config.proto, as
JSON. A configuration that oneDNN refuses ends the process, so callers give none that could be.

Source: openxla/xla, xla/backends/cpu/runtime/onednn, xla/service/cpu/onednn_convolution.cc, onednn_matmul.cc and
onednn_layer_norm.cc
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import torch
from jax import Array

from ...runtime import clients, machine, private, programs
from ..dtypes import DType

# Releases of jaxlib whose reading of the configuration is known. Others may number dimensions from one.
KNOWN = ((0, 10), (0, 11), (0, 12))
# Those, exactly, that were tried with weights in oneDNN's own order. XLA looks at no such weight's size or order: where either is another
# than in the version that was tried, a kernel computes nonsense, reads past the weight's end, or ends the process.
PACKED = frozenset(["0.10.2"])

_MATMUL = "__onednn$matmul"
_CONVOLUTION = "__onednn$convolution"
_LAYER_NORM = "__onednn$layernorm"


@functools.cache
def is_available() -> bool:
    """Whether this XLA:CPU runs oneDNN's kernels."""
    if tuple(map(int, private.jaxlib_version().split(".")[:2])) not in KNOWN:
        return False
    device = clients.cpu_device()
    with jax.default_device(device):
        lowered = jax.jit(lambda x: matmul(x, x, False, False, x.dtype)).lower(jax.ShapeDtypeStruct((8, 8), np.float32))
    try:
        programs.compile_lowered(lowered, device, {})
    except jax.errors.JaxRuntimeError:  # no such call
        return False
    return True


def takes_packed() -> bool:
    """Whether weights may be given to oneDNN in its own order."""
    return private.jaxlib_version() in PACKED and is_available()


@functools.cache
def takes(dtype: DType) -> bool:
    """Whether oneDNN computes with this dtype here, and at least as fast as with float32."""
    if dtype == np.float32:
        return is_available()
    if dtype == jax.numpy.bfloat16:
        return is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return False


# Where 1 / rows + 1 / columns is at least this, oneDNN's product for AVX2 copies no operand (its gemm_driver.cpp).
_NO_COPY = 0.0038
# float32 numbers: at such distances all that it reads one after another falls into few places of the first cache.
_CRITICAL_DISTANCE = 512


def is_slow(rows: int, columns: int, transpose_x: bool, transpose_y: bool, dtype: DType) -> bool:
    """Whether oneDNN's product misses the cache at each step: it takes 1.1 to 1.9 times as long as MKL's with AVX2. Arguments: as for
    `matmul`; rows and columns are the result's."""
    if not machine.has_avx2_alone() or dtype != np.float32:
        return False
    distances = ([rows] if transpose_x else []) + ([] if transpose_y else [columns])
    return 1 / rows + 1 / columns >= _NO_COPY and any(distance % _CRITICAL_DISTANCE == 0 for distance in distances)


# Of XLA's names for what oneDNN may do with a product besides, those that keep NaNs (RELU and RELU6 do not).
ACTIVATIONS = {"gelu": "GELU_ERF", "gelu_tanh": "GELU_TANH", "sigmoid": "SIGMOID", "tanh": "TANH"}


def matmul(
    x: Array,
    y: Array,
    transpose_x: bool,
    transpose_y: bool,
    dtype: DType,
    bias: Array | None = None,
    activation: str = "",
    orders: Sequence[tuple[int, ...] | None] = (None, None, None),
    *,
    packed: int = 0,
) -> Array:
    """The products of the matrices in the last two dimensions; equal dimensions before them. bias: added to each row; activation: then
    applied to each number. orders: dimensions of x, y and the result from the slowest in memory to the fastest; None: row-major.
    packed: y's columns, if y is one matrix in oneDNN's own order (see weight_orders.py), and x one too.

    Shape: x (..., m, k), or (..., k, m) with transpose_x; y (..., k, n), or (..., n, k) with transpose_y; bias (n,); result (..., m, n).
    Dtype: x and y float32 or bfloat16; result `dtype`, which is theirs or float32.
    """
    rows, columns = x.shape[-1 if transpose_x else -2], packed or y.shape[-2 if transpose_y else -1]
    fused = [*(["BIAS"] if bias is not None else []), *([ACTIVATIONS[activation]] if activation else [])]
    config: dict[str, Any] = {"transpose_a": transpose_x, "transpose_b": transpose_y, "fusions": {"ops": fused}}
    if packed:
        config["optimization_config"] = {"weights_prepacked": True}
    operands = [x, y]
    if bias is not None:
        operands.append(bias.reshape((1,) * (x.ndim - 1) + bias.shape))
    result = jax.ShapeDtypeStruct((*x.shape[:-2], rows, columns), dtype)
    layouts = [*orders[:2], *[None] * (len(operands) - 2)]
    return _call(_MATMUL, {"onednn_matmul_config": config}, operands, result, layouts, orders[2])


def convolution(
    x: Array,
    weight: Array,
    shape: Sequence[int],
    stride: Sequence[int],
    margins: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
    dtype: DType,
    bias: Array | None = None,
    *,
    swapped: bool = False,
    packed: Sequence[int] = (),
) -> Array:
    """A convolution over one to three spatial dimensions.

    Shape: x (batch, *space, in), weight (out, in / groups, *kernel), or (in, out, *kernel) if `swapped`, bias (out,), result `shape`
    (batch, *space, out). margins: at both ends of each spatial dimension, not negative. packed: weight's shape, if it is in oneDNN's own
    order (see weight_orders.py).
    Dtype: x and weight float32 or bfloat16; result `dtype`, which is theirs or float32.
    """
    data = {"batch_dim": 0, "feature_dim": x.ndim - 1, "spatial_dims": list(range(1, x.ndim - 1))}
    config: dict[str, Any] = {
        "dims": x.ndim,
        "input": {"dims": x.ndim, "data": data},
        "kernel": {
            "dims": x.ndim,
            "filter": {
                "output_feature_dim": int(swapped),
                "input_feature_dim": int(not swapped),
                "spatial_dims": list(range(2, x.ndim)),
            },
        },
        "output": {"dims": x.ndim, "data": data},
        "window": {
            "pad_left": [low for low, _ in margins],
            "pad_right": [high for _, high in margins],
            "strides": list(stride),
            "window_dilations": list(dilation),
        },
        "feature_groups": groups,
    }
    if packed:
        config["kernel"]["filter"]["shape"] = list(packed)
        config["optimization_config"] = {"weights_prepacked": True}
    operands = [x, weight]
    if bias is not None:
        config["fusions"] = {"ops": ["BIAS"]}
        operands.append(bias)
    result = jax.ShapeDtypeStruct(tuple(shape), dtype)
    return _call(_CONVOLUTION, {"onednn_conv_config": config}, operands, result, [None] * len(operands), None)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """x normalized over its last dimension, times weight, plus bias.

    Shape: x of two to five dimensions; weight and bias that of its last one. Dtype: x float32 or bfloat16, weight and bias float32.
    """
    config = {"rescale": "SCALE_AND_SHIFT", "epsilon_typecast": int(np.float32(eps).view(np.int32))}
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _call(_LAYER_NORM, {"onednn_layer_norm_config": config}, [x, weight, bias], result, [None, None, None], None)


def _call(
    target: str,
    config: dict[str, Any],
    operands: Sequence[Array],
    result: jax.ShapeDtypeStruct,
    layouts: Sequence[tuple[int, ...] | None],
    layout: tuple[int, ...] | None,
) -> Array:
    """layouts: the operands' dimensions, from the slowest in memory to the fastest; layout: the result's. None: row-major."""
    call = jax.ffi.ffi_call(
        target,
        result,
        vmap_method="sequential",
        input_layouts=layouts,
        output_layouts=layout,
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(config),
    )
    return call(*operands)
