"""Tests of variances and norms with rounded sizes. The padding contains NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.compare import assert_equal
from support.comparisons.rounded_sizes import SIZES, assert_one_program, compiled, counts, features, poisoned

pytestmark = pytest.mark.usefixtures("quick_xla")


def norm(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    mean, variance = t[0] * 1, t[1].square() + 1
    F.batch_norm(x, mean, variance, t[2], t[3], True, 0.2)
    return torch.stack([mean, variance])


def group_statistics(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    images = (x + torch.zeros(4, dtype=x.dtype)).transpose(1, 2).contiguous()
    return torch.native_group_norm(images, None, None, x.shape[0], 4, x.shape[1], 2, 0.1)[1:]


VARIANCES: list[Callable[..., Any]] = [
    lambda x, y, n, t: (y + 3).var(1),
    lambda x, y, n, t: (x + 5).std((0, 1), correction=0),
    lambda x, y, n, t: x.half().var(1, keepdim=True),
    lambda x, y, n, t: torch.stack(torch.var_mean(x.double(), (1, 2), correction=2)),
    lambda x, y, n, t: y.std(),
    lambda x, y, n, t: torch.var_mean(y, 0, keepdim=True)[0],
    lambda x, y, n, t: x.flatten(0, 1).std(0),
    lambda x, y, n, t: norm(x.transpose(1, 2), t),
    lambda x, y, n, t: (F.batch_norm(x.transpose(1, 2), t[0] * 1, t[1].square() + 1, t[2], t[3], True) * y[:, None]).sum(2),
    lambda x, y, n, t: F.batch_norm(x[:, 0], t[0] * 1, t[1].square() + 1, t[2], training=True),
    lambda x, y, n, t: F.batch_norm(x.transpose(1, 2), t[0] * 1, t[1].square() + 1, t[2], t[3]).sum(2),
    lambda x, y, n, t: F.instance_norm(x[:, :4].transpose(1, 2)),
    lambda x, y, n, t: F.group_norm((x + torch.zeros(4))[:, :5].transpose(1, 2), 2, t[0], t[1]),
    lambda x, y, n, t: F.group_norm((x + torch.zeros(4)).transpose(1, 2), 2, t[0], t[1]).cumsum(2),
    lambda x, y, n, t: F.group_norm((y[:, None, :, None] + y[:, None, None, :]) * torch.ones(4, 1, 1), 4, eps=0.1).exp().sum((2, 3)),
    lambda x, y, n, t: group_statistics(x)[0],
    lambda x, y, n, t: F.layer_norm(y, y.shape[1:], y[0], y[1], 0.1),
    lambda x, y, n, t: F.layer_norm(x + 3, x.shape, eps=0.1).cumsum(1),
    lambda x, y, n, t: F.layer_norm(x.half(), x.shape[1:]).sum(1),
    lambda x, y, n, t: torch.native_layer_norm(x, x.shape[1:], None, None, 0.1)[1],
    lambda x, y, n, t: torch.native_layer_norm(y, y.shape[1:], None, y[2], 0.1)[2],
    lambda x, y, n, t: group_statistics(x.half())[1],
]


@pytest.mark.quick
def test_variances_and_norms_ignore_padding() -> None:
    assert_one_program(VARIANCES, features)


def test_gradients_of_norms() -> None:
    norms = [torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4).eval(), *[torch.nn.GroupNorm(2, 4) for _ in range(2)]]
    networks = torch.nn.ModuleList([*norms, torch.nn.GroupNorm(1, 4, affine=False)]).double()

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        transposed = x.transpose(1, 2)
        results = [networks[0](transposed), networks[1](transposed), networks[2](transposed[..., :3]).sum(-1, keepdim=True)]
        results += [networks[3](transposed), networks[4](transposed[:, :, None]).exp()[:, :, 0]]
        results += [F.layer_norm(y, y.shape[1:], y[0], y[1])[:, None], F.layer_norm(y, y.shape)[:, None]]
        results.append(F.layer_norm(transposed, transposed.shape[1:], None, transposed[0]))
        return sum((result * y[:, None]).sum() + result.square().sum() for result in results)

    def gradients(run: Callable[..., torch.Tensor], *inputs: torch.Tensor) -> list[torch.Tensor]:
        leaves = [item.double().requires_grad_() for item in inputs]
        result = run(*leaves)
        return [result.detach(), *torch.autograd.grad(result, [*networks.parameters(), *leaves])]

    run, before = compiled(function), counts()
    with poisoned():
        for sizes in SIZES[:2]:
            inputs = features(*sizes)[:2]
            statistics = networks[0].state_dict()
            old = {name: item.clone() for name, item in statistics.items()}
            expected, new = gradients(function, *inputs), {name: item.clone() for name, item in statistics.items()}
            networks[0].load_state_dict(old)
            for found, wanted in zip(gradients(run, *inputs), expected, strict=True):
                torch.testing.assert_close(found, wanted)  # the strides of sums of gradients are aot_eager's
            assert_equal(dict(networks[0].state_dict()), new)
    assert counts() == (before[0] + 2, before[1])
