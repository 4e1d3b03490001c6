"""Tests of writes by index with rounded sizes: invalid indices in the padding write no valid element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.comparisons.rounded_sizes import assert_one_program, compiled, features, poisoned

pytestmark = [pytest.mark.usefixtures("quick_xla"), pytest.mark.quick]

aten = torch.ops.aten

WRITES: list[Callable[..., Any]] = [
    lambda x, y, n, t: t.index_put((n,), x, accumulate=True),
    lambda x, y, n, t: t.index_put((n,), t[0], accumulate=True),
    lambda x, y, n, t: t.index_put((n[:, 0],), t[0]),
    lambda x, y, n, t: y.index_put((n[:, 1] % 5, n[:, 0]), torch.ones(())),
    lambda x, y, n, t: y.index_put((n[:, 1] % 5, n[:, 0]), y[:, 0] * 0 + 2).cumsum(1),
    lambda x, y, n, t: y.index_put((torch.arange(x.shape[0])[:, None], n % 2 - 2), y * 0 + 1),
    lambda x, y, n, t: x.masked_fill(n[..., None] > 3, 0).index_put((n < 2,), torch.ones(1)),
    lambda x, y, n, t: t.index_add(0, n[0], x[0], alpha=2),
    lambda x, y, n, t: y.index_add(1, n[0], y),
    lambda x, y, n, t: t.index_copy(0, n[0], x[0] * 0 + 1),
    lambda x, y, n, t: y.index_fill(1, n[0], 3.0).cumsum(1),
    lambda x, y, n, t: y.index_fill(1, n[0] - 7, 3.0),
    lambda x, y, n, t: y.index_fill(1, n[0, :2] - 7, y[0, 0]).fill_(n[0, 0]) + y,
    lambda x, y, n, t: x.scatter(0, n[..., None] % 5, 5).cumsum(1),
    lambda x, y, n, t: x.new_zeros(x.shape[0], 7).scatter(1, n, y * 0 + 5),
    lambda x, y, n, t: x.new_zeros(x.shape[0], 7).scatter(1, n, 5),
    lambda x, y, n, t: x.new_zeros(x.shape[0], 7).scatter_add(1, n, y),
    lambda x, y, n, t: y.scatter_add(1, n, y).sum(1),
    lambda x, y, n, t: x.new_zeros(x.shape[0], 7).scatter_reduce(1, n, y, "amax", include_self=False),
    lambda x, y, n, t: x.new_zeros(x.shape[0], 7).scatter_reduce(1, n, y, "sum"),
    lambda x, y, n, t: x.new_ones(x.shape[0], 7).scatter_reduce(1, n, y, "prod"),
    lambda x, y, n, t: x.new_ones(x.shape[0], 7).scatter_reduce(1, n, y, "prod", include_self=False),
    lambda x, y, n, t: y.slice_scatter(y[:, 1:] * 2, 1, 0, y.shape[1] - 1).cumsum(1),
    lambda x, y, n, t: y.slice_scatter(y[:, :3] * 2, 1, -3).sum(1),
    lambda x, y, n, t: y.slice_scatter(y[:, 2:], 1, 2).sum(1),
    lambda x, y, n, t: x.new_zeros(20, x.shape[2]).slice_scatter(x[0], 0, 3, 3 + x.shape[1]),
    lambda x, y, n, t: y.slice_scatter(y[:, :0], 1, 2, 2) * 2,
    lambda x, y, n, t: y.select_scatter(y[:, 0], 1, -1).cumsum(1),
    lambda x, y, n, t: y.select_scatter(y[1], 0, 0).sum(0),
]


def test_padding_writes_no_valid_element() -> None:
    assert_one_program(WRITES, features)


def test_valid_indices_out_of_range_raise() -> None:
    run = compiled(lambda x, n: x.scatter_add(0, n, x).index_put((n,), x, accumulate=True))
    n = torch.tensor([0, 8, 3, 1, 2, 0, 5, 6, 7])
    x = torch.ones(9)
    with poisoned():
        torch.testing.assert_close(run(x, n), x.scatter_add(0, n, x).index_put((n,), x, accumulate=True))
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            run(x, n + 1)  # index 9 exists only in the padding
