"""Tests of reductions, views and constants with rounded sizes. The padding contains NaN and invalid indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.rounded_sizes import assert_one_program, features

pytestmark = [pytest.mark.usefixtures("quick_xla"), pytest.mark.quick]

Functions = list[Callable[..., Any]]

REDUCTIONS: Functions = [
    lambda x, y, n, t: x.sum(),
    lambda x, y, n, t: x.sum(1),
    lambda x, y, n, t: (x + 1).mean((0, 1)),
    lambda x, y, n, t: x.half().mean(1),
    lambda x, y, n, t: x.mean(),
    lambda x, y, n, t: x.amax(1),
    lambda x, y, n, t: (x - 9).amax((0, 2), keepdim=True),
    lambda x, y, n, t: (n + 3).amin(1),
    lambda x, y, n, t: (x > -9).all(),
    lambda x, y, n, t: (x > 9).any(1),
    lambda x, y, n, t: x.max(1).indices,
    lambda x, y, n, t: x.min(0).values,
    lambda x, y, n, t: (y - 9).argmax(1),
    lambda x, y, n, t: y.argmin(0, keepdim=True),
    lambda x, y, n, t: x.logsumexp(1),
    lambda x, y, n, t: (n + 1).double().prod(1),
    lambda x, y, n, t: x.reshape(-1, 4).sum(0),
    lambda x, y, n, t: x.reshape(-1).amin(),
    lambda x, y, n, t: torch.linalg.vector_norm(x, dim=1),
    lambda x, y, n, t: torch.linalg.vector_norm(x, -1.5, dim=1),
    lambda x, y, n, t: torch.linalg.vector_norm(y, -torch.inf, dim=0),
    lambda x, y, n, t: torch.linalg.vector_norm(n.double(), 0, dim=1),
    lambda x, y, n, t: torch.where(n % 3 > 0, n.float(), torch.nan).nansum(1),
    lambda x, y, n, t: torch.complex(y, y + 1).sum(1).abs() + torch.complex(y, y + 1).prod(1).abs(),
    lambda x, y, n, t: torch.complex(n - 9.0, y * 0).all(1),
    lambda x, y, n, t: torch.complex(y * 0, y * 0).any(1),
    lambda x, y, n, t: (n > 3).sum(1),
    lambda x, y, n, t: torch.count_nonzero(n),
    lambda x, y, n, t: torch.ones_like(x).sum(1),
    lambda x, y, n, t: t[0].expand(x.shape[0], 4).sum(0),
    lambda x, y, n, t: x.std(-1),
    lambda x, y, n, t: x.topk(2, -1).values,
    lambda x, y, n, t: n.cumsum(1),
    lambda x, y, n, t: x * x.shape[1] + y.sum() / y.shape[0],
    lambda x, y, n, t: n < y.shape[1],
    lambda x, y, n, t: x.half() * x.shape[1] + x.half().sum(1, keepdim=True) / (x.shape[1] / 3),
    lambda x, y, n, t: x.bfloat16().mean() / x.shape[1] - x.shape[0],
    lambda x, y, n, t: y.sum() * (x.shape[1] / 3),
    lambda x, y, n, t: (x.shape[1] - n) * (x.shape[1] / 2 - y) + (x.shape[0] - y.half()),
    lambda x, y, n, t: (n * 5) % y.shape[1] + n * 7 // y.shape[1] + torch.div(n * 9, y.shape[1], rounding_mode="trunc"),
    lambda x, y, n, t: (y * 9) % y.shape[1] + torch.fmod(y * 9, y.shape[0]) + (y * 9) // y.shape[1],
    lambda x, y, n, t: y.exp().cumsum(0),
    lambda x, y, n, t: F.glu(x, -1),
    lambda x, y, n, t: torch.ops.aten.glu_backward(x[..., :2] + 1, x, -1),
    lambda x, y, n, t: y.softmax(-1),
    lambda x, y, n, t: (y - 9).log_softmax(0),
    lambda x, y, n, t: x.view(-1, 4).sigmoid().mean(0),
]

POSITIONS: Functions = [
    lambda x, y, n, t: x[:, -1],
    lambda x, y, n, t: F.hardswish(x)[:, -4:-1],
    lambda x, y, n, t: x[-3:],
    lambda x, y, n, t: x[:, 1:-1],
    lambda x, y, n, t: x[:, ::2],
    lambda x, y, n, t: x[1, 2:] * 2,
    lambda x, y, n, t: torch.cat([y, y + 1], 1),
    lambda x, y, n, t: torch.cat([y, x[:, :, 0], y[:, :1]], 1).sum(1),
    lambda x, y, n, t: torch.cat([y[:1], y]).cumsum(0),
    lambda x, y, n, t: torch.cat([x, x], -1),
    lambda x, y, n, t: torch.cat([y.half(), n, y > 0], 1).cumsum(1),
    lambda x, y, n, t: y.view(torch.int32) % 7,
    lambda x, y, n, t: y.view(torch.int16).view(torch.float32).cumsum(1),
    lambda x, y, n, t: n.flatten().view(torch.int32).view(x.shape[0], -1)[:, ::2],
    lambda x, y, n, t: x.view(torch.int64).view(torch.float32).cumsum(1),
    lambda x, y, n, t: F.pad(y, (1, 2), value=3.0).sum(1),
    lambda x, y, n, t: F.pad(x, (1, 2)),
    lambda x, y, n, t: torch.arange(x.shape[1]) + y,
    lambda x, y, n, t: torch.arange(2, x.shape[1] + 2).sum(),
    lambda x, y, n, t: y.new_zeros(x.shape[:2]) + 1,
    lambda x, y, n, t: torch.stack([y, -y], 1),
    lambda x, y, n, t: x.flip(-1),
    lambda x, y, n, t: y.unsqueeze(1).repeat(1, 3, 1).sum((1, 2)),
    lambda x, y, n, t: x.transpose(1, 2).reshape(x.shape[0], -1),
    lambda x, y, n, t: x.reshape(-1, 2, 2).transpose(1, 2).sum(0),
    lambda x, y, n, t: x.reshape(x.shape[0] * x.shape[1], 4)[:, 1:].reshape(x.shape[0], x.shape[1], 3),
    lambda x, y, n, t: y.unsqueeze(-1).expand(-1, -1, x.shape[1]).tril(),
    lambda x, y, n, t: y.unsqueeze(0).squeeze(0).t() + 1,
    lambda x, y, n, t: x.unbind(2)[1] + x.split(2, 2)[0].sum(-1),
    lambda x, y, n, t: y.masked_fill(torch.ones(x.shape[1], x.shape[1])[0] > 2, 1.0),
    lambda x, y, n, t: (n > 2).float().masked_fill(n > 5, torch.tensor(9.0)).cumsum(1),
    lambda x, y, n, t: (torch.eye(x.shape[1]) + torch.eye(x.shape[1], x.shape[0] + 1)[:, :1]).sum(0),
]


def test_reductions_ignore_padding() -> None:
    assert_one_program(REDUCTIONS, features)


def test_positions_count_from_true_ends() -> None:
    # The functions get and return copies: a view of an input would not be a result of the program.
    assert_one_program([lambda *given, own=function: own(*(item * 1 for item in given)) + 0 for function in POSITIONS], features)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.complex64], ids=str)
def test_logarithms_of_sums_of_other_dtypes(dtype: torch.dtype) -> None:
    """No value of an integer dtype is neutral: its exponential counts."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.logcumsumexp(0) if dtype.is_complex else torch.logsumexp(x, 0)

    call = torch.compile(function, backend="dynaxla", dynamic=True, options={"sizes": "buckets", "compile": "now"})
    for size in (5, 6, 9):
        x = torch.zeros(size, dtype=dtype)
        torch.testing.assert_close(call(x), function(x))


def test_padding_with_zeros_of_both_signs() -> None:
    call = torch.compile(
        lambda x: [F.pad(x * 2, (0, 2), value=value) for value in (0.0, -0.0)],
        backend="dynaxla", dynamic=True, options={"sizes": "buckets", "compile": "now"},
    )  # fmt: skip
    for size in (5, 6, 9):
        positive, negative = call(torch.ones(size))
        assert not positive[-1].signbit()
        assert negative[-1].signbit()
