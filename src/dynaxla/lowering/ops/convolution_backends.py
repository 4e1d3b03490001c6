"""Convolution ops that are named after particular kernels of torch. A graph has them only if the user's program calls them directly."""

from __future__ import annotations

from collections.abc import Sequence

from jax import Array, lax

from ...errors import UnsupportedOp
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dimensions import Sizes
from ..promotion import convert
from ..registry import lowers
from .convolution import convolution, convolution_backward, convolve


@lowers(aten._convolution.default)
def convolution_with_settings(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    benchmark: bool,
    deterministic: bool,
    cudnn_enabled: bool,
    allow_tf32: bool,
    *,
    ctx: Context,
) -> Array:
    """Same as `convolution`. The last four arguments select torch's kernels, and have no effect here."""
    return convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, ctx=ctx)


@lowers(aten._slow_conv2d_forward.default, aten.slow_conv3d_forward.default)
def slow_conv(x: Array, weight: Array, kernel: Sizes, bias: Array | None, stride: Sizes, padding: Sizes, *, ctx: Context) -> Array:
    """Same as `convolution` with one group. `kernel` is not read: it repeats the spatial sizes of the weight."""
    return convolution(x, weight, bias, stride, padding, [1], False, [0], 1, ctx=ctx)


@lowers(aten._slow_conv2d_backward.output_mask)
def slow_conv_backward(
    grad: Array, x: Array, weight: Array, kernel: Sizes, stride: Sizes, padding: Sizes, output_mask: Sequence[bool], *, ctx: Context
) -> tuple[Array | None, Array | None, Array | None]:
    """Same as `convolution_backward` with one group."""
    return convolution_backward(grad, x, weight, None, stride, padding, [1], False, [0], 1, output_mask, ctx=ctx)


def _require_batch(x: Array, weight: Array) -> None:
    if x.ndim != weight.ndim:
        raise UnsupportedOp(
            f"a convolution of an input of rank {x.ndim} with a weight of rank {weight.ndim}: this op needs a batch dimension",
            hint="use the convolutions of torch.nn.functional",
        )


@lowers(aten.slow_conv_dilated2d.default, aten.slow_conv_dilated3d.default)
def slow_conv_dilated(
    x: Array, weight: Array, kernel: Sizes, bias: Array | None, stride: Sizes, padding: Sizes, dilation: Sizes, *, ctx: Context
) -> Array:
    """Same as `convolution` with one group."""
    _require_batch(x, weight)
    return convolution(x, weight, bias, stride, padding, dilation, False, [0], 1, ctx=ctx)


@lowers(aten.slow_conv_transpose2d.default, aten.slow_conv_transpose3d.default)
def slow_conv_transpose(
    x: Array,
    weight: Array,
    kernel: Sizes,
    bias: Array | None,
    stride: Sizes,
    padding: Sizes,
    output_padding: Sizes,
    dilation: Sizes,
    *,
    ctx: Context,
) -> Array:
    """Same as a transposed `convolution` with one group."""
    _require_batch(x, weight)
    return convolution(x, weight, bias, stride, padding, dilation, True, output_padding, 1, ctx=ctx)


@lowers(aten._conv_depthwise2d.default, aten.conv_depthwise3d.default)
def conv_depthwise(
    x: Array, weight: Array, kernel: Sizes, bias: Array | None, stride: Sizes, padding: Sizes, dilation: Sizes, *, ctx: Context
) -> Array:
    """Same as `convolution` with one group for each channel of x."""
    _require_batch(x, weight)
    return convolution(x, weight, bias, stride, padding, dilation, False, [0], x.shape[1], ctx=ctx)


@lowers(aten.conv_tbc.default)
def conv_tbc(x: Array, weight: Array, bias: Array, pad: int = 0, *, ctx: Context) -> Array:
    """A convolution over the first dimension, time, with `pad` zeros before the first time and after the last.

    Shape:  x (time, batch, in), weight (kernel, in, out) and bias (out) give (time + 2 * pad - kernel + 1, batch, out).
    Dtype:  that of x.
    """
    dtype = dtypes.accumulator(x.dtype)
    shape = ctx.output.shape
    if 0 in x.shape or 0 in weight.shape or 0 in shape:
        out = lax.full(shape, 0, dtype)
    else:
        time_first = (1, 2, 0)
        out = lax.conv_general_dilated(
            x,
            weight,
            window_strides=(1,),
            padding=[(pad, pad)],
            dimension_numbers=lax.ConvDimensionNumbers(time_first, (2, 1, 0), time_first),
            precision=ctx.settings.convolution_precision,
            preferred_element_type=dtype,
        )
    return convert(lax.add(out, lax.broadcast_in_dim(convert(bias, dtype), shape, (2,))), x.dtype)


@lowers(aten.conv_tbc.default, platforms=["cuda"])
def conv_tbc_by_convolution(x: Array, weight: Array, bias: Array, pad: int = 0, *, ctx: Context) -> Array:
    """Same as `conv_tbc`, by an implementation of `convolution`.

    The transposes cost nothing extra: XLA transposes the operands to cuDNN's order of dimensions in any case.
    """
    time, batch, channels = ctx.output.shape
    x, weight = lax.transpose(x, (1, 2, 0)), lax.transpose(weight, (2, 1, 0))
    out = convolve(x, weight, bias, (batch, channels, time), [1], [pad], [1], 1, ctx)
    return convert(lax.transpose(out, (2, 0, 1)), ctx.output.jax_dtype)
