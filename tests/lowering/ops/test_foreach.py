"""Ops on lists of tensors, and optimizers that use them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynaxla.observe import coverage
from support.comparisons.compare import check

aten = torch.ops.aten


def test_promotion_norms_and_mutation() -> None:
    def function(xs: list[torch.Tensor], ys: list[torch.Tensor]) -> list[Any]:
        half = torch._foreach_add(xs, ys, alpha=2)
        torch._foreach_add_(ys, 1)
        torch._foreach_copy_(xs, ys)
        norms = [torch._foreach_norm(ys, order) for order in (0, 1, 3.5, float("inf"))]
        return [
            half,
            *norms,
            torch._foreach_norm(xs, 2, torch.float64),
            torch._foreach_mul(xs, 2.5),
            torch._foreach_div(ys, torch.tensor(3)),
        ]

    xs = [torch.arange(3), torch.ones(2, 2, dtype=torch.float16), torch.tensor(2.0)]
    ys = [torch.tensor([0.5, float("nan"), -1]), torch.full((2, 2), 70000.0), torch.tensor(1, dtype=torch.float64)]
    check(function, [x.to(torch.float32) for x in xs], ys)
    check(lambda xs, ys: torch._foreach_add(xs, ys), xs, ys)
    check(lambda xs: (list(aten._foreach_max(xs)), torch._foreach_maximum(xs, 0.25), torch._foreach_clamp_max(xs, xs)), ys)
    check(lambda xs: torch._foreach_abs(xs), [torch.zeros(0, 2), torch.randn(2, dtype=torch.complex64)])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda parameters, **options: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1, **options),
    "AdamW": lambda parameters, **options: torch.optim.AdamW(parameters, amsgrad=True, **options),
    "Rprop": torch.optim.Rprop,
}


@pytest.mark.sample(usual=1)
@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_optimizer_steps_match_eager_mode(name: str, foreach: bool) -> None:
    mine = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    theirs = copy.deepcopy(mine)
    my_optimizer, their_optimizer = (OPTIMIZERS[name](net.parameters(), foreach=foreach) for net in (mine, theirs))
    coverage.reset()
    step = torch.compile(my_optimizer.step, backend="dynaxla", options={"fallback": "error"})
    for _ in range(3):
        x = torch.randn(5, 3)
        for net in (mine, theirs):
            net.zero_grad()
            net(x).square().sum().backward()
        step()
        their_optimizer.step()
    assert sum(count["lowered"] for count in coverage.snapshot().values()) > 0
    torch.testing.assert_close(list(mine.parameters()), list(theirs.parameters()), rtol=2e-5, atol=2e-5)
