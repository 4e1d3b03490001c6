"""as_strided: reads and writes by strides in memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynaxla.errors import UnsupportedOp
from support.comparisons.compare import check
from support.comparisons.gradients import check_gradients

aten = torch.ops.aten


def test_strides() -> None:
    x = torch.randn(4, 6)
    check_gradients(lambda x: (x.clone().as_strided((3, 2), (2, 5), 1).neg(), x.exp().as_strided((6, 4), (1, 6)).neg()), x)
    check(
        lambda x: (
            x.t().clone().as_strided((4, 3), (1, 2), 3) + 1,  # memory is row-major over [6, 4]
            x.exp().t().as_strided((24,), (1,)) + 1,  # memory order is not that of the dimensions
            x.exp()[:, 1:4].as_strided((2, 2), (6, 1)) + 1,  # within a view with gaps
            x.exp().as_strided((2, 3), (0, 1), 4) + 1,
            x.exp().as_strided((0, 3), (1, 1)),
        ),
        x,
        calls=1,
    )


def test_writes_through_strides() -> None:
    def function(x: torch.Tensor) -> Any:
        y = x.exp().t().contiguous()
        y.as_strided((3, 2), (2, 5), 1).mul_(2)
        return y, torch.as_strided_scatter(x, x[:2, :2] + 1, (2, 2), (1, 3), 2)

    check(function, torch.randn(4, 6))


def test_strides_outside_of_a_view_raise() -> None:
    function = torch.compile(lambda x: x.exp()[:, :2].as_strided((4, 6), (6, 1)) + 1, backend="dynaxla", fullgraph=True)
    with pytest.raises(UnsupportedOp, match="outside of that tensor"):
        function(torch.randn(4, 6))
