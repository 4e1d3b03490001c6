"""Images: padding, resampling, and sampling at given positions."""

from typing import Any

import torch

from lowering.table.rows import FLOATS, FORMULA, PAIR, Make, Op, Samples, aten
from support.releases import ops_here

SPACE = (4, 6, 5)
PADDING = [1, 2, 0, 1, 2, 1]
# Eager mode computes the weights in the dtype of the image, or in float32.
SUMS = {torch.float32: (1e-4, 2e-5), torch.float64: (1e-6, 1e-6), torch.float16: (3e-2, 3e-2), torch.bfloat16: (3e-2, 3e-2)}


def space(dims: int) -> tuple[int, ...]:
    return SPACE[3 - dims :]


def padded(dims: int) -> Samples:
    return lambda make, n: [(make(n, 2, *space(dims)), PADDING[: 2 * dims])]


def after_padding(dims: int) -> Samples:
    pads = list(reversed([PADDING[2 * dim] + PADDING[2 * dim + 1] for dim in range(dims)]))
    shape = [size + pad for size, pad in zip(space(dims), pads, strict=True)]
    return lambda make, n: [(make(n, 2, *shape), make(n, 2, *space(dims)), PADDING[: 2 * dims])]


def resampled(dims: int, *aligned: bool) -> Samples:
    """Samples with each value of `align_corners`, if the op has this argument."""
    size = [3, 9, 4][3 - dims :]
    return lambda make, n: [(make(n, 2, *space(dims)), size, *align) for align in [(a,) for a in aligned] or [()]]


def after_resampling(dims: int, *aligned: bool) -> Samples:
    size = [3, 9, 4][3 - dims :]
    return lambda make, n: [(make(n, 2, *size), size, [n, 2, *space(dims)], *align) for align in [(a,) for a in aligned] or [()]]


def sampled(dims: int) -> Samples:
    """Samples: bilinear with zero padding, and nearest with reflection. The other modes take long to compile."""
    return lambda make, n: [
        (make(n, 2, *space(dims)), make(n, *(2, 3, 2)[:dims], dims), mode, padding, aligned)
        for mode, padding, aligned in ((0, 0, False), (1, 2, True))
    ]


def after_sampling(dims: int) -> Samples:
    return lambda make, n: [(make(n, 2, *sample[1].shape[1:-1]), *sample, [True, True]) for sample in sampled(dims)(make, n)[:1]]


def windowed(make: Make, n: int) -> list[tuple[Any, ...]]:
    """Samples: overlapping windows, and windows with gaps, one of them beyond the image's end."""
    return [(make(n, 2, 5, 6), [3, 2], [1, 1], [1, 0], [1, 2]), (make(n, 2, 7, 6), [2, 2], [2, 1], [0, 1], [2, 3])]


def of_windows(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [(make(n, 12, 15), [5, 6], [3, 2], [1, 1], [1, 0], [1, 2]), (make(n, 8, 9), [7, 6], [2, 2], [2, 1], [0, 1], [2, 3])]


ROWS: list[Op] = [
    Op(aten.reflection_pad2d.default, padded(2), FLOATS),
    Op(aten.replication_pad2d.default, padded(2), FLOATS),
    *(
        Op(op, padded(dims), PAIR)
        for dims, ops in (
            (1, (aten.reflection_pad1d.default, aten.replication_pad1d.default)),
            (3, (aten.reflection_pad3d.default, aten.replication_pad3d.default)),
        )
        for op in ops
    ),
    *(
        Op(op, after_padding(dims), PAIR)
        for dims, ops in (
            (1, (aten.reflection_pad1d_backward.default, aten.replication_pad1d_backward.default)),
            (2, (aten.reflection_pad2d_backward.default, aten.replication_pad2d_backward.default)),
            (3, (aten.reflection_pad3d_backward.default, aten.replication_pad3d_backward.default)),
        )
        for op in ops
    ),
    Op(aten.im2col.default, windowed, FLOATS, without=["empty"]),
    Op(aten.col2im.default, of_windows, FLOATS, tolerance=SUMS, without=["empty"]),
    Op(aten.pixel_shuffle.default, lambda make, n: [(make(n, 4, 3, 2), 2)], FLOATS),
    Op(aten.upsample_nearest2d.default, resampled(2), (*FLOATS, torch.uint8), without=["empty"]),
    Op(aten.upsample_bilinear2d.default, resampled(2, False, True), FLOATS, tolerance=SUMS, without=["empty"]),
    Op(aten.upsample_bicubic2d.default, resampled(2, False, True), FLOATS, tolerance=SUMS, without=["empty"]),
    *(
        Op(op, resampled(dims, *aligned), PAIR, tolerance=SUMS, without=["empty"])
        for dims, aligned, op in (
            (1, (), aten.upsample_nearest1d.default), (3, (), aten.upsample_nearest3d.default),
            (1, (), aten._upsample_nearest_exact1d.default), (2, (), aten._upsample_nearest_exact2d.default),
            (3, (), aten._upsample_nearest_exact3d.default), (2, (False, True), aten._upsample_bilinear2d_aa.default),
            *((2, (False,), op) for op in ops_here("aten._upsample_lanczos2d_aa.default")),
        )
    ),
    *(  # torch fails to trace their gradients with symbolic sizes
        Op(op, resampled(dims, False, True), PAIR, tolerance=SUMS, without=["empty", "changing sizes"])
        for dims, op in (
            (1, aten.upsample_linear1d.default), (3, aten.upsample_trilinear3d.default), (2, aten._upsample_bicubic2d_aa.default),
        )
    ),
    *(
        Op(op, after_resampling(dims, *aligned), PAIR, tolerance=SUMS, without=["empty"])
        for dims, aligned, op in (
            (1, (), aten.upsample_nearest1d_backward.default), (2, (), aten.upsample_nearest2d_backward.default),
            (3, (), aten.upsample_nearest3d_backward.default), (1, (), aten._upsample_nearest_exact1d_backward.default),
            (2, (), aten._upsample_nearest_exact2d_backward.default), (3, (), aten._upsample_nearest_exact3d_backward.default),
            (1, (False, True), aten.upsample_linear1d_backward.default), (2, (False, True), aten.upsample_bilinear2d_backward.default),
            (3, (False, True), aten.upsample_trilinear3d_backward.default), (2, (False, True), aten.upsample_bicubic2d_backward.default),
            (2, (False, True), aten._upsample_bilinear2d_aa_backward.default),
            (2, (False, True), aten._upsample_bicubic2d_aa_backward.default),
            *((2, (False,), op) for op in ops_here("aten._upsample_lanczos2d_aa_backward.default")),
        )
    ),
    Op(aten.grid_sampler_2d.default, sampled(2), PAIR, tolerance=SUMS),
    Op(aten.grid_sampler_3d.default, sampled(3), PAIR, tolerance=SUMS),
    Op(aten.grid_sampler_2d_backward.default, after_sampling(2), PAIR, tolerance=SUMS, **FORMULA),
    Op(aten.grid_sampler_3d_backward.default, after_sampling(3), PAIR, tolerance=SUMS, **FORMULA),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {}
