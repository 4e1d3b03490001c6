"""Grouped matrix products."""

from __future__ import annotations

import torch

from support.comparisons.compare import assert_equal
from support.comparisons.gradients import check_gradients
from support.comparisons.single_op import check_op

aten = torch.ops.aten


def ends(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()  # the only dtype that torch's shape propagation accepts


def test_groups() -> None:
    op = aten._grouped_mm.default
    x, weights = random(70, 16), random(4, 16, 8)
    compiled = torch.compile(lambda x, w, offs: op(x, w, offs), backend="dynaxla", fullgraph=True, options={"fallback": "error"})
    for offsets in (ends(0, 3, 45, 70), ends(70, 70, 70, 70), ends(17, 33, 33, 70), ends(0, 0, 0, 70)):
        assert_equal(compiled(x, weights, offsets), op(x, weights, offsets))
    check_op(op, x, weights.transpose(1, 2).contiguous().transpose(1, 2), ends(10, 20, 30, 70))
    check_op(op, random(3, 8, 16), random(3, 16, 24))
    check_op(op, random(3, 8, 16), random(16, 40), ends(8, 8, 40))
    check_op(op, random(8, 72), random(72, 16), ends(8, 8, 48, 72))


def test_nan_stays_in_its_group() -> None:
    x, weights = random(24, 16), random(3, 16, 8)
    x[7], weights[2] = float("nan"), float("inf")
    check_op(aten._grouped_mm.default, x, weights, ends(8, 16, 24))
    check_op(aten._grouped_mm.default, x.t().contiguous(), random(24, 8), ends(8, 16, 24))


def test_gradients() -> None:
    check_gradients(lambda x, w, offs: aten._grouped_mm(x, w, offs), random(40, 16), random(3, 16, 8), constants=[ends(8, 24, 40)])
