"""What works on windows or neighbours: convolutions, pooling, padding and resampling."""

from lowering.table.rows import FLOATS, Op, aten, image

ROWS: list[Op] = [
    Op(aten.avg_pool2d.default, image([2, 2]), FLOATS),
    Op(aten.max_pool2d_with_indices.default, image([2, 2]), FLOATS),
    Op(aten._adaptive_avg_pool2d.default, image([3, 2]), FLOATS),
    Op(aten.reflection_pad2d.default, image([1, 2, 0, 1]), FLOATS),
    Op(aten.replication_pad2d.default, image([1, 2, 0, 1]), FLOATS),
    Op(aten.pixel_shuffle.default, lambda make, n: [(make(n, 4, 3, 2), 2)], FLOATS),
    Op(aten.upsample_nearest2d.default, image([9, 4]), FLOATS, without=["empty"]),
    Op(aten.upsample_bilinear2d.default, image([9, 4], False), FLOATS, without=["empty"]),
    Op(aten.convolution.default, lambda make, n: [
        (make(n, 2, 6, 5), make(3, 2, 3, 3), make(3), [1, 2], [1, 0], [1, 1], False, [0, 0], 1)
    ], FLOATS),
]  # fmt: skip

# By test file: the ops without a row, and why.
ELSEWHERE: dict[str, str] = {}
