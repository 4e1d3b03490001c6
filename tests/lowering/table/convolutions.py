"""Convolutions: the general op, and the ops for particular kernels."""

from typing import Any

import torch

from lowering.table.rows import FLOATS, IN_ORDER, NO_FAKE, PAIR, Make, Op, aten

# About twenty products are summed, in another order and with other rounding.
SUMS = {torch.float16: (5e-3, 3e-2), torch.bfloat16: (4e-2, 0.3), torch.float32: (1e-4, 1e-4)}
EACH = [True, True, True]


def plain(make: Make, n: int) -> list[tuple[Any, ...]]:
    return [(make(n, 2, 6, 5), make(3, 2, 3, 3), make(3), [1, 2], [1, 0], [1, 1], False, [0, 0], 1)]


def backward(make: Make, n: int) -> list[tuple[Any, ...]]:
    """The gradients of a plain convolution, and of a transposed one with groups."""
    return [
        (make(n, 3, 6, 2), make(n, 2, 6, 5), make(3, 2, 3, 3), [3], [1, 2], [1, 0], [1, 1], False, [0, 0], 1, EACH),
        (make(n, 4, 7, 4), make(n, 2, 3, 4), make(2, 2, 2, 1), [4], [2, 1], [0, 0], [1, 1], True, [1, 0], 2, EACH),
    ]


def by_kernel(*rest: Any, transposed: bool = False) -> Any:
    """Samples with two or three spatial dimensions."""
    spatial, size = (([4, 5], [2, 3]), ([3, 4, 5], [2, 1, 3]))[len(rest[0]) - 2]
    weight = (2, 3) if transposed else (3, 2)
    return lambda make, n: [(make(n, 2, *spatial), make(*weight, *size), size, make(3), *rest)]


ROWS: list[Op] = [
    Op(aten.convolution.default, plain, FLOATS),
    Op(aten.convolution_backward.default, backward, FLOATS, tolerance=SUMS),
    Op(aten._convolution.default, lambda make, n: [(*sample, False, False, True, True) for sample in plain(make, n)], PAIR),
    Op(aten._slow_conv2d_forward.default, by_kernel([1, 2], [1, 1]), PAIR, without=NO_FAKE),
    # Eager mode's result is wrong for a gradient that is not contiguous.
    Op(aten._slow_conv2d_backward.output_mask,
       lambda make, n: [(make(n, 3, 3, 4), make(n, 2, 4, 5), make(3, 2, 2, 2), [2, 2], [1, 1], [0, 0], EACH)], PAIR,
       without=[*NO_FAKE, *IN_ORDER]),
    Op(aten.slow_conv3d_forward.default, by_kernel([1, 2, 1], [1, 0, 1]), PAIR, without=NO_FAKE),
    Op(aten.slow_conv_dilated2d.default, by_kernel([1, 2], [1, 1], [2, 1]), PAIR, without=NO_FAKE),
    Op(aten.slow_conv_dilated3d.default, by_kernel([1, 2, 1], [1, 0, 1], [1, 2, 1]), PAIR, without=NO_FAKE),
    Op(aten.slow_conv_transpose2d.default, by_kernel([2, 1], [1, 0], [1, 0], [1, 2], transposed=True), PAIR, without=NO_FAKE),
    Op(aten.slow_conv_transpose3d.default, by_kernel([2, 1, 1], [1, 0, 1], [1, 0, 0], [1, 2, 1], transposed=True), PAIR, without=NO_FAKE),
    Op(aten.conv_tbc.default, lambda make, n: [(make(6, n, 3), make(2, 3, 4), make(4), 1)], PAIR, without=IN_ORDER),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {
    # These ops have kernels for GPUs alone.
    "lowering/ops/test_convolution_backends.py": "aten._conv_depthwise2d.default aten.conv_depthwise3d.default",
}
