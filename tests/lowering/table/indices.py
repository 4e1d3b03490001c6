"""What reads or writes where indices say."""

import torch
from lowering.table.rows import EVERY, NUMERIC, Op, aten

ROWS: list[Op] = [
    Op(aten.index_select.default, lambda make, n: [(make(n, 3), 1, torch.tensor([2, 0]))], EVERY),
    Op(aten.gather.default, lambda make, n: [(make(n, 3), 1, torch.ones(n, 2, dtype=torch.int64))], EVERY),
    Op(aten.scatter_add.default, lambda make, n: [(make(n, 3), 1, torch.ones(n, 2, dtype=torch.int64), make(n, 2))], NUMERIC),
    Op(aten.index_add.default, lambda make, n: [(make(n, 3), 1, torch.tensor([2, 0]), make(n, 2))], NUMERIC),
]  # fmt: skip

# By test file: the ops without a row, and why.
ELSEWHERE: dict[str, str] = {}
