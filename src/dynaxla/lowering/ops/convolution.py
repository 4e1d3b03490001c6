"""Convolutions and their gradients, in PyTorch's own order of dimensions (batch, channel, space)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jax import Array, lax

from .. import dtypes, onednn
from ..context import Context
from ..dtypes import DType
from ..forms import Forms, Operand
from ..promotion import convert, number
from ..registry import lowers

aten = torch.ops.aten

Sizes = Sequence[int]


@dataclass(frozen=True)
class Convolution:
    """What a convolution is asked to do, apart from its operands' values.

    Attributes: x, weight, out (shapes; weight (out, in / groups, *kernel), or (in, out, *kernel) if `swapped`); stride; margins (at both
    ends of each spatial dimension; negative ones cut off); spread (the distance of x's values from each other, with zeros in between);
    dilation (the same of weight's); groups; dtype (of x and weight; the result's is it too, or its accumulator's); precision; platform.
    """

    x: tuple[int, ...]
    weight: tuple[int, ...]
    out: tuple[int, ...]
    stride: tuple[int, ...]
    margins: tuple[tuple[int, int], ...]
    spread: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    swapped: bool
    dtype: DType
    precision: lax.Precision
    platform: str

    @property
    def products(self) -> int:
        """How many numbers are multiplied."""
        inputs = self.weight[0 if self.swapped else 1]
        return math.prod(self.out) * inputs * math.prod(self.weight[2:])

    @property
    def result_order(self) -> tuple[int, ...] | None:
        """On the CPU, activations lie channels-last between convolutions."""
        return (0, *range(2, len(self.x)), 1) if self.platform == "cpu" else None

    @property
    def operands(self) -> tuple[Operand, ...]:
        return Operand(self.x, self.dtype, self.result_order), Operand(self.weight, self.dtype)

    def __str__(self) -> str:
        shapes = f"{self.dtype}{list(self.x)} by {list(self.weight)}{', swapped' if self.swapped else ''}"
        plain = {"stride": 1, "margins": (0, 0), "spread": 1, "dilation": 1}
        given = [(name, getattr(self, name)) for name, value in plain.items() if any(item != value for item in getattr(self, name))]
        given += [("groups", self.groups)] if self.groups > 1 else []
        return ", ".join([shapes, *(f"{name} {value}" for name, value in given)])


CONVOLUTION: Forms[Convolution] = Forms("convolution")

# Below so many products, what a call of oneDNN costs (15 microseconds) is more than what it saves.
_FEW_PRODUCTS = 250_000


def _fits_onednn(problem: Convolution) -> bool:
    return problem.platform == "cpu" and 3 <= len(problem.x) <= 5 and onednn.takes(problem.dtype)


@CONVOLUTION.form("onednn", fits=_fits_onednn, suits=lambda problem: problem.groups > 1 or problem.products >= _FEW_PRODUCTS)
def _by_onednn(problem: Convolution, x: Array, weight: Array, bias: Array | None = None) -> Array:
    margins = problem.margins
    if any(step > 1 for step in problem.spread) or any(margin < 0 for ends in margins for margin in ends):
        inside = [(*ends, step - 1) for ends, step in zip(margins, problem.spread, strict=True)]
        x = lax.pad(x, number(0, x.dtype), [(0, 0, 0), (0, 0, 0), *inside])
        margins = ((0, 0),) * len(margins)
    settings = problem.out, problem.stride, margins, problem.dilation, problem.groups
    return onednn.convolution(x, weight, *settings, x.dtype, bias, swapped=problem.swapped)


@CONVOLUTION.form("xla")
def _by_xla(problem: Convolution, x: Array, weight: Array, bias: Array | None = None) -> Array:
    out = lax.conv_general_dilated(
        x,
        weight,
        window_strides=problem.stride,
        padding=problem.margins,
        lhs_dilation=problem.spread,
        rhs_dilation=problem.dilation,
        dimension_numbers=_dimension_numbers(_PLAIN, _SWAPPED if problem.swapped else _PLAIN, _PLAIN, x.ndim),
        feature_group_count=problem.groups,
        precision=problem.precision,
        preferred_element_type=dtypes.accumulator(x.dtype),
    )
    return out if bias is None else lax.add(out, lax.broadcast_in_dim(convert(bias, out.dtype), out.shape, (1,)))


@lowers(aten.convolution.default)
def convolution(
    x: Array,
    weight: Array,
    bias: Array | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    *,
    ctx: Context,
) -> Array:
    """Shape: x (batch, in, *space), weight (out, in / groups, *kernel); transposed: weight (in, out / groups, *kernel)."""
    stride, padding, dilation = _per_dim(x, stride, padding, dilation)
    shape = ctx.output.shape
    if transposed:
        # The gradient of the convolution that goes the other way, with respect to its input.
        out = _input_gradient(x, weight, bias, shape, stride, padding, dilation, groups, ctx)
    else:
        out = _convolve(x, weight, bias, shape, stride, padding, dilation, groups, ctx)
    return convert(out, x.dtype)


@lowers(aten.convolution_backward.default)
def convolution_backward(
    grad: Array,
    x: Array,
    weight: Array,
    bias_sizes: Sizes | None,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
    output_mask: Sequence[bool],
    *,
    ctx: Context,
) -> tuple[Array | None, Array | None, Array | None]:
    """Gradients of input, weight and bias: those that output_mask asks for."""
    stride, padding, dilation = _per_dim(x, stride, padding, dilation)
    grad_input = grad_weight = grad_bias = None
    if output_mask[0]:
        if transposed:
            grad_input = _convolve(grad, weight, None, x.shape, stride, padding, dilation, groups, ctx)
        else:
            grad_input = _input_gradient(grad, weight, None, x.shape, stride, padding, dilation, groups, ctx)
        grad_input = convert(grad_input, x.dtype)
    if output_mask[1]:
        wide, narrow = (grad, x) if transposed else (x, grad)
        grad_weight = convert(_weight_gradient(wide, narrow, weight.shape, stride, padding, dilation, groups, ctx), weight.dtype)
    if output_mask[2]:
        total = lax.reduce_sum(convert(grad, dtypes.accumulator(grad.dtype)), [0, *range(2, grad.ndim)])
        grad_bias = convert(total, grad.dtype)
    return grad_input, grad_weight, grad_bias


def _per_dim(x: Array, *settings: Sizes) -> list[list[int]]:
    """Settings given once for all spatial dimensions, repeated for each."""
    count = x.ndim - 2
    return [list(values) * count if len(values) == 1 else list(values) for values in settings]


def _dimension_numbers(lhs: tuple[int, int], rhs: tuple[int, int], out: tuple[int, int], rank: int) -> lax.ConvDimensionNumbers:
    """Where (batch, feature), (output, input) features and (batch, feature) lie; space comes last in all three."""
    space = tuple(range(2, rank))
    return lax.ConvDimensionNumbers(lhs + space, rhs + space, out + space)


_PLAIN = (0, 1)
_SWAPPED = (1, 0)


def _convolve(
    x: Array, weight: Array, bias: Array | None, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, ctx: Context
) -> Array:
    """The plain convolution, in x's dtype or the accumulator's."""
    space = range(2, x.ndim)
    margins, reached = [], []
    for dim, step, pad, spread in zip(space, stride, padding, dilation, strict=True):
        margins.append((pad, pad))
        reached.append((x.shape[dim] + 2 * pad - spread * (weight.shape[dim] - 1) - 1) // step + 1)
    natural = (*shape[:2], *reached)
    out = _correlate(x, weight, bias, natural, ctx, groups, stride=stride, margins=margins, dilation=dilation)
    # The gradient of a transposed convolution: an output padding beyond the stride gives more places than its input has.
    return out if out.shape == tuple(shape) else lax.slice(out, [0] * out.ndim, shape)


def _input_gradient(
    grad: Array, weight: Array, bias: Array | None, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, ctx: Context
) -> Array:
    """What flows back to an input of `shape`: grad spread out by the stride, convolved with the mirrored weight."""
    space = range(2, grad.ndim)
    mirrored = lax.rev(weight, tuple(dim for dim in space if weight.shape[dim] > 1))
    if groups > 1:
        # (groups * out, in, ...) -> (groups * in, out, ...): XLA splits the first of the output features, so both carry the group.
        out, into = weight.shape[0] // groups, weight.shape[1]
        mirrored = lax.reshape(mirrored, (groups, out, *weight.shape[1:]))
        mirrored = lax.transpose(mirrored, (0, 2, 1, *range(3, grad.ndim + 1)))
        mirrored = lax.reshape(mirrored, (groups * into, out, *weight.shape[2:]))
    margins = []
    for dim, step, pad, spread in zip(space, stride, padding, dilation, strict=True):
        reach = spread * (weight.shape[dim] - 1)
        covered = (grad.shape[dim] - 1) * step + 1
        margins.append((reach - pad, shape[dim] + pad - covered))
    return _correlate(grad, mirrored, bias, shape, ctx, groups, margins=margins, spread=stride, dilation=dilation, swapped=groups == 1)


def _correlate(
    x: Array,
    weight: Array,
    bias: Array | None,
    shape: Sizes,
    ctx: Context,
    groups: int,
    *,
    stride: Sizes = (),
    margins: Sequence[tuple[int, int]],
    spread: Sizes = (),
    dilation: Sizes,
    swapped: bool = False,
) -> Array:
    """The sum of products over windows, by the form that is best for it; see `Convolution`."""
    if 0 in x.shape or 0 in weight.shape or 0 in shape:
        out = lax.full(shape, 0, dtypes.accumulator(x.dtype))
        return out if bias is None else lax.add(out, lax.broadcast_in_dim(convert(bias, out.dtype), out.shape, (1,)))
    ones = (1,) * (x.ndim - 2)
    problem = Convolution(
        x.shape,
        weight.shape,
        tuple(shape),
        tuple(stride) or ones,
        tuple(margins),
        tuple(spread) or ones,
        tuple(dilation),
        groups,
        swapped,
        x.dtype,
        ctx.convolution_precision,
        ctx.platform,
    )
    return ctx.choose(CONVOLUTION, problem).run(problem, x, weight, bias)


def _weight_gradient(
    x: Array, grad: Array, shape: Sizes, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, ctx: Context
) -> Array:
    """The gradient of a weight of `shape` (out, in / groups, *kernel): x convolved with grad, batch and channels in each other's roles."""
    dtype = dtypes.accumulator(x.dtype)
    if 0 in x.shape or 0 in grad.shape or math.prod(shape) == 0:
        return lax.full(shape, 0, dtype)
    margins = []
    for dim, step, pad, spread in zip(range(2, x.ndim), stride, padding, dilation, strict=True):
        covered = (grad.shape[dim] - 1) * step + 1
        wanted = (shape[dim] - 1) * spread + covered
        margins.append((pad, wanted - x.shape[dim] - pad))
    return lax.conv_general_dilated(
        x,
        grad,
        window_strides=dilation,
        padding=margins,
        rhs_dilation=stride,
        dimension_numbers=_dimension_numbers(_SWAPPED, _SWAPPED, _SWAPPED, x.ndim),
        batch_group_count=groups,
        precision=ctx.convolution_precision,
        preferred_element_type=dtype,
    )
