"""Custom calls of oneDNN's convolution, matrix product and layer normalization, which run inside XLA:CPU's programs.

On x86-64, jaxlib contains oneDNN. XLA's compiler itself emits no calls of oneDNN, but accepts custom calls in a program, which run on the
program's buffers and threads. A call has a configuration: a message of XLA's xla/service/cpu/onednn_config.proto, as JSON. A configuration
that oneDNN rejects aborts the process, so callers must pass supported configurations only. `onednn_support.py` decides where the calls are
used.

`python onednn.py DTYPE...` tests the calls of this module in a process of its own. For this purpose the module imports neither dynaxla nor
torch.

Source: openxla/xla, xla/backends/cpu/runtime/onednn, xla/service/cpu/onednn_convolution.cc, onednn_matmul.cc and
onednn_layer_norm.cc
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

DType = np.dtype

_MATMUL = "__onednn$matmul"
_CONVOLUTION = "__onednn$convolution"
_LAYER_NORM = "__onednn$layernorm"


# XLA's names of the activations that oneDNN fuses into a product, without RELU and RELU6, which do not propagate NaNs.
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
) -> Array:
    """Returns the products of the matrices in the last two dimensions. The dimensions before the last two are equal in x and y.

    Args:
        transpose_x: True if the matrices of x are transposed; see Shape.
        transpose_y: True if the matrices of y are transposed; see Shape.
        dtype: The dtype of the result.
        bias: The bias, which is added to each row; or None.
        activation: A key of ACTIVATIONS, applied after the bias is added; or "".
        orders: The memory orders of x, y and the result: dimensions from the slowest-varying to the fastest. None means row-major.

    Shape:  x (..., m, k), or (..., k, m) with transpose_x; y (..., k, n), or (..., n, k) with transpose_y; bias (n,); result (..., m, n).
    Dtype:  x and y float32 or bfloat16; result `dtype`, which is theirs or float32.
    """
    rows, columns = x.shape[-1 if transpose_x else -2], y.shape[-2 if transpose_y else -1]
    fused = [*(["BIAS"] if bias is not None else []), *([ACTIVATIONS[activation]] if activation else [])]
    config: dict[str, Any] = {"transpose_a": transpose_x, "transpose_b": transpose_y, "fusions": {"ops": fused}}
    operands = [x, y]
    if bias is not None:
        operands.append(bias.reshape((1,) * (x.ndim - 1) + bias.shape))
    result = jax.ShapeDtypeStruct((*x.shape[:-2], rows, columns), dtype)
    operand_orders = [*orders[:2], *[None] * (len(operands) - 2)]
    return _call(_MATMUL, {"onednn_matmul_config": config}, operands, result, operand_orders, orders[2])


def convolution(
    x: Array,
    weight: Array,
    result_shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
    dtype: DType,
    bias: Array | None = None,
    *,
    transposed_weight: bool = False,
) -> Array:
    """Returns a convolution over one to three spatial dimensions.

    Args:
        result_shape: The shape of the result.
        padding: (low, high) of each spatial dimension, not negative.
        transposed_weight: True if the first two dimensions of the weight are swapped; see Shape.

    Shape:  x (batch, *space, in); weight (out, in / groups, *kernel), or (in, out, *kernel) with transposed_weight; bias (out,); result
            (batch, *space, out).
    Dtype:  x and weight float32 or bfloat16; result `dtype`, which is theirs or float32.
    """
    data = {"batch_dim": 0, "feature_dim": x.ndim - 1, "spatial_dims": list(range(1, x.ndim - 1))}
    config: dict[str, Any] = {
        "dims": x.ndim,
        "input": {"dims": x.ndim, "data": data},
        "kernel": {
            "dims": x.ndim,
            "filter": {
                "output_feature_dim": int(transposed_weight),
                "input_feature_dim": int(not transposed_weight),
                "spatial_dims": list(range(2, x.ndim)),
            },
        },
        "output": {"dims": x.ndim, "data": data},
        "window": {
            "pad_left": [low for low, _ in padding],
            "pad_right": [high for _, high in padding],
            "strides": list(stride),
            "window_dilations": list(dilation),
        },
        "feature_groups": groups,
    }
    operands = [x, weight]
    if bias is not None:
        config["fusions"] = {"ops": ["BIAS"]}
        operands.append(bias)
    result = jax.ShapeDtypeStruct(tuple(result_shape), dtype)
    return _call(_CONVOLUTION, {"onednn_conv_config": config}, operands, result, [None] * len(operands), None)


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Returns x normalized over its last dimension, times weight, plus bias.

    Shape:  x (..., n), with two to five dimensions; weight (n,) and bias (n,); result that of x.
    Dtype:  x float32 or bfloat16; weight and bias float32.
    """
    # The message has no float field for epsilon: XLA reads the bits of epsilon_typecast (int32) as a float32.
    config = {"rescale": "SCALE_AND_SHIFT", "epsilon_typecast": int(np.float32(eps).view(np.int32))}
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _call(_LAYER_NORM, {"onednn_layer_norm_config": config}, [x, weight, bias], result, [None, None, None], None)


def _call(
    target: str,
    config: dict[str, Any],
    operands: Sequence[Array],
    result: jax.ShapeDtypeStruct,
    operand_orders: Sequence[tuple[int, ...] | None],
    result_order: tuple[int, ...] | None,
) -> Array:
    """Returns the result of a custom call.

    Args:
        target: The name of the call, such as `_MATMUL`.
        config: The configuration, as {name of its field in BackendConfig: fields of the message}.
        operands: The arrays that the call reads.
        result: The shape and dtype of the result.
        operand_orders: The memory order of each operand: dimensions from the slowest-varying to the fastest. None means row-major.
        result_order: The memory order of the result, in the same form.
    """
    call = jax.ffi.ffi_call(
        target,
        result,
        vmap_method="sequential",
        input_layouts=operand_orders,
        output_layouts=result_order,
        custom_call_api_version=2,
        legacy_backend_config=json.dumps(config),
    )
    return call(*operands)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda v: jax.nn.gelu(v, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


def _xla_convolution(x: Array, weight: Array, stride: list[int], padding: list[tuple[int, int]], dilation: list[int], groups: int) -> Array:
    """Returns a convolution of channels-last arrays, computed by XLA in float32."""
    dims = range(1, x.ndim - 1)
    numbers = lax.ConvDimensionNumbers((0, x.ndim - 1, *dims), tuple(range(x.ndim)), (0, x.ndim - 1, *dims))
    x, weight = x.astype(np.float32), weight.astype(np.float32)
    return lax.conv_general_dilated(
        x, weight, stride, padding, rhs_dilation=dilation, dimension_numbers=numbers, feature_group_count=groups
    )


def self_test(dtype: DType) -> str:
    """Compares each call with XLA's own ops, in one JAX program.

    Returns: "" if all results agree, otherwise the name of the first call whose result differs.
    """
    generator = np.random.default_rng(0)
    shapes = {
        "x": (2, 24, 40), "y": (2, 40, 32), "bias": (32,), "scale": (40,), "offset": (40,), "channel_bias": (16,),
        "image": (2, 9, 10, 8), "kernel": (16, 8, 3, 2), "group_kernel": (16, 4, 3, 2), "sequence": (2, 17, 8), "kernel_1d": (16, 8, 3),
        "volume": (1, 5, 6, 4, 8), "kernel_3d": (16, 8, 1, 3, 2),
    }  # fmt: skip
    arrays = {name: generator.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}

    def compared(
        x: Array, y: Array, bias: Array, scale: Array, offset: Array, channel_bias: Array, image: Array, kernel: Array,
        group_kernel: Array, sequence: Array, kernel_1d: Array, volume: Array, kernel_3d: Array,
    ) -> dict[str, tuple[Array, Array]]:  # fmt: skip
        """Returns the result of each custom call, with the result of XLA's own ops."""
        pairs: dict[str, tuple[Array, Array]] = {}
        product = jnp.matmul(x.astype(np.float32), y.astype(np.float32))
        for transpose_x in (False, True):
            for transpose_y in (False, True):
                a, b = (item.swapaxes(1, 2) if transposed else item for item, transposed in ((x, transpose_x), (y, transpose_y)))
                pairs[f"matmul {transpose_x} {transpose_y}"] = matmul(a, b, transpose_x, transpose_y, dtype, bias), product + bias
        for name, function in _ACTIVATIONS.items():
            pairs[f"matmul with {name}"] = matmul(x, y, False, False, dtype, bias, name), function(product + bias)
        orders = ((0, 2, 1), (0, 2, 1), (1, 0, 2))
        pairs["matmul in other orders"] = matmul(x, y, False, False, np.dtype(np.float32), orders=orders), product
        cases: dict[str, tuple[Array, Array, list[int], list[tuple[int, int]], list[int], int]] = {
            "convolution": (image, kernel, [2, 1], [(1, 1), (0, 2)], [1, 2], 1),
            "convolution by groups": (image, group_kernel, [1, 1], [(0, 0), (1, 1)], [1, 1], 2),
            "convolution of sequences": (sequence, kernel_1d, [1], [(2, 0)], [1], 1),
            "convolution of volumes": (volume, kernel_3d, [1, 2, 1], [(0, 0), (1, 1), (0, 0)], [1, 1, 1], 1),
        }
        for name, (operand, weight, stride, padding, dilation, groups) in cases.items():
            expected = _xla_convolution(operand, weight, stride, padding, dilation, groups) + channel_bias
            settings = expected.shape, stride, padding, dilation, groups, dtype, channel_bias
            pairs[name] = convolution(operand, weight, *settings), expected
            if groups == 1:
                transposed = convolution(operand, weight.swapaxes(0, 1), *settings, transposed_weight=True)
                pairs[f"{name}, transposed weight"] = transposed, expected
        x_float32 = x.astype(np.float32)
        mean, variance = x_float32.mean(-1, keepdims=True), x_float32.var(-1, keepdims=True)
        scale, offset = scale.astype(np.float32), offset.astype(np.float32)
        pairs["layer_norm"] = layer_norm(x, scale, offset, 1e-3), (x_float32 - mean) / jnp.sqrt(variance + 1e-3) * scale + offset
        return pairs

    tolerance = 2e-3 if dtype == np.float32 else 5e-2
    results = jax.jit(compared, compiler_options={"xla_backend_optimization_level": 0})(**arrays)
    for name, (result, expected) in results.items():
        if not np.allclose(np.asarray(result, np.float32), np.asarray(expected, np.float32), rtol=tolerance, atol=tolerance):
            return name
    return ""


if __name__ == "__main__":
    print("started", flush=True)
    for _name in sys.argv[1:]:
        print(_name, self_test(jnp.dtype(_name)) or "passed", flush=True)
