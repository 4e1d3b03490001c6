"""Views, copies and what puts tensors together."""

import torch
from lowering.table.rows import EVERY, Op, along_each_dim, aten, either, of

ROWS: list[Op] = [
    Op(aten.permute.default, of([1, 0]), EVERY),
    Op(aten.unsqueeze.default, along_each_dim, EVERY),
    Op(aten.expand.default, lambda make, n: [(make(n, 1), [2, n, 4])], EVERY),
    Op(aten.select.int, of(1, 2), EVERY),
    Op(aten.slice.Tensor, either((0, 1, 3), (1, 0, 3, 2)), EVERY),
    Op(aten.cat.default, lambda make, n: [([make(n, 3), make(n, 3)], dim) for dim in (0, 1)], EVERY),
    Op(aten.stack.default, lambda make, n: [([make(n, 3), make(n, 3)], dim) for dim in (0, -1)], EVERY),
    Op(aten.flip.default, either(([0],), ([0, 1],), ([],)), EVERY),
    Op(aten.roll.default, either(([1], [0]), ([2],)), EVERY),
    Op(aten.repeat.default, of([2, 1, 3]), EVERY),
    Op(aten.tril.default, either((), (1,)), EVERY),
    Op(aten.triu.default, either((), (-1,)), EVERY),
    Op(aten.diagonal.default, either((), (1,)), EVERY),
    Op(aten.constant_pad_nd.default, either(([1, 2],), ([1, -1, 0, 2], 1)), EVERY),
    Op(aten.unfold.default, of(1, 2, 1), EVERY),
    Op(aten.clone.default, of(), EVERY),
    Op(aten._to_copy.default, of(), EVERY),
    Op(aten.sort.default, along_each_dim, (torch.float32, torch.float64)),
]  # fmt: skip

# By test file: the ops without a row, and why.
ELSEWHERE: dict[str, str] = {}
