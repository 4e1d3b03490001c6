"""Pooling and its gradients, which take an upstream gradient, the input, and saved values."""

from typing import Any

import torch

from lowering.table.rows import FLOATS, NO_FAKE, PAIR, Op, Samples, aten, image


def volume(*rest: Any) -> Samples:
    return lambda make, n: [(make(n, 2, 4, 6, 5), *rest)]


def after_average(forward: Any, *shape: int, kernel: list[int], **changed: Any) -> Samples:
    settings = {"stride": kernel, "padding": [0] * len(kernel), "ceil_mode": False, "count_include_pad": True, "divisor": None} | changed

    def samples(make: Any, n: int) -> list[tuple[Any, ...]]:
        x = make(n, *shape)
        return [(make(*forward(x, kernel, *settings.values()).shape), x, kernel, *settings.values())]

    return samples


def after_adaptive_average(forward: Any, size: list[int], *shape: int) -> Samples:
    def samples(make: Any, n: int) -> list[tuple[Any, ...]]:
        x = make(n, *shape)
        return [(make(*forward(x, size).shape), x)]

    return samples


def after_maximum(forward: Any, *shape: int, settings: list[Any], backward: list[Any]) -> Samples:
    """Samples. `backward`: the arguments of the backward op between its input and the indices of the maxima."""

    def samples(make: Any, n: int) -> list[tuple[Any, ...]]:
        x = make(n, *shape)
        out, indices = forward(x, *settings)
        return [(make(*out.shape), x, *backward, indices)]

    return samples


def maxima(make: Any, n: int, *shape: int, among: int) -> torch.Tensor:
    """Random indices of maxima, all different within an image."""
    count = torch.Size(shape[1:]).numel()
    return torch.rand(n, shape[0], among).argsort(-1)[..., :count].reshape(n, *shape).contiguous()


TWO, THREE = (2, 6, 5), (2, 4, 6, 5)
WIDE, DEEP = [[3, 2], [2, 1], [1, 0], [1, 2], True], [[2, 3, 2], [1, 2, 2], [0, 1, 0], [1, 1, 2], False]

ROWS: list[Op] = [
    Op(aten.avg_pool2d.default, image([2, 2]), FLOATS),
    Op(aten.avg_pool3d.default, volume([2, 3, 2], [1, 2, 2], [0, 1, 0], True, False), PAIR),
    Op(aten.avg_pool2d_backward.default,
       after_average(aten.avg_pool2d, *TWO, kernel=[3, 2], padding=[1, 0], count_include_pad=False), FLOATS),
    Op(aten.avg_pool3d_backward.default, after_average(aten.avg_pool3d, *THREE, kernel=[2, 3, 2], divisor=5), PAIR),
    Op(aten._adaptive_avg_pool2d.default, image([3, 2]), FLOATS),
    Op(aten._adaptive_avg_pool3d.default, volume([3, 4, 2]), PAIR),
    Op(aten._adaptive_avg_pool2d_backward.default, after_adaptive_average(aten._adaptive_avg_pool2d, [4, 2], *TWO), FLOATS),
    Op(aten._adaptive_avg_pool3d_backward.default, after_adaptive_average(aten._adaptive_avg_pool3d, [3, 4, 2], *THREE), PAIR),
    Op(aten.max_pool2d_with_indices.default, image([2, 2]), FLOATS),
    Op(aten.max_pool3d_with_indices.default, volume(*DEEP), PAIR),
    Op(aten.max_pool2d_with_indices_backward.default,
       after_maximum(aten.max_pool2d_with_indices, *TWO, settings=WIDE, backward=WIDE), FLOATS),
    Op(aten.max_pool3d_with_indices_backward.default,
       after_maximum(aten.max_pool3d_with_indices, *THREE, settings=DEEP, backward=DEEP), PAIR),
    Op(aten.adaptive_max_pool2d.default, image([4, 2]), FLOATS),
    Op(aten.adaptive_max_pool3d.default, volume([3, 4, 2]), PAIR),
    # If windows share a maximum, torch's kernel rounds every sum of gradients to the half type.
    Op(aten.adaptive_max_pool2d_backward.default, after_maximum(aten.adaptive_max_pool2d, *TWO, settings=[[4, 2]], backward=[]), FLOATS,
       tolerance={torch.float16: (2e-3, 4e-3), torch.bfloat16: (1.6e-2, 3.2e-2)}),
    Op(aten.adaptive_max_pool3d_backward.default, after_maximum(aten.adaptive_max_pool3d, *THREE, settings=[[3, 4, 2]], backward=[]), PAIR),
    Op(aten.max_unpool2d.default, lambda make, n: [(make(n, 2, 3, 2), maxima(make, n, 2, 3, 2, among=20), [5, 4])], PAIR),
    Op(aten.max_unpool3d.default,
       lambda make, n: [(make(n, 2, 2, 3, 2), maxima(make, n, 2, 2, 3, 2, among=60), [3, 5, 4], [1, 2, 2], [0, 0, 0])], PAIR),
    Op(aten.fractional_max_pool2d.default,
       lambda make, n: [(make(n, *TWO), [2, 3], [4, 2], make(n, 2, 2).abs() / 3)], FLOATS, constants=[3]),
    Op(aten.fractional_max_pool3d.default,
       lambda make, n: [(make(n, *THREE), [2, 2, 1], [2, 3, 4], make(n, 2, 3).abs() / 3)], PAIR, constants=[3], without=NO_FAKE),
    Op(aten.fractional_max_pool2d_backward.default,
       lambda make, n: [(make(n, 2, 2, 2), make(n, *TWO), [2, 3], [2, 2], maxima(make, n, 2, 2, 2, among=30))], PAIR),
    Op(aten.fractional_max_pool3d_backward.default,
       lambda make, n: [(make(n, 2, 2, 2, 1), make(n, *THREE), [2, 2, 1], [2, 2, 1], maxima(make, n, 2, 2, 2, 1, among=120))], PAIR,
       without=NO_FAKE),
]  # fmt: skip

# The ops without a row, by the file that tests them.
ELSEWHERE: dict[str, str] = {}
