"""Tests of Python floats that change between calls: they cause no new graph, and results are eager mode's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.comparisons.compare import assert_equal

# Earlier releases compile again for each value of a computed float, such as -lr, with the same results: their tensorify_python_scalars
# does not support Python's operators.
KEEPS_FLOATS = torch.__version__ >= (2, 13)

OPS: dict[str, Callable[[torch.Tensor, torch.Tensor, float], Any]] = {
    "alpha": lambda x, y, s: (torch.add(x, y, alpha=s), torch.sub(x, y, alpha=-s), torch.rsub(x, y, alpha=s)),
    "alpha of a float": lambda x, y, s: (torch.add(x, s, alpha=2), torch.sub(y, s, alpha=3)),
    "alpha, promoted": lambda x, y, s: (torch.add(x, y.long(), alpha=s), torch.add(x.double(), y, alpha=s)),
    "addcmul": lambda x, y, s: (torch.addcmul(x, x, y, value=s), x.clone().addcmul_(y, x, value=s)),
    "addcdiv": lambda x, y, s: (torch.addcdiv(x, x, y, value=s), x.clone().addcdiv_(y, y, value=-s)),
    "addr": lambda x, y, s: (torch.addr(x, x[:, 0], y, alpha=s), torch.addr(y, x[:, 1], y, beta=s / 2, alpha=-s)),
    "lerp": lambda x, y, s: (torch.lerp(x, y, s), x.clone().lerp_(y, s / 10)),
    "pow": lambda x, y, s: (torch.pow(y.abs(), s), torch.pow(s, x), y.abs() ** (s / 2)),
    "foreach": lambda x, y, s: (
        *torch._foreach_add([x, y], s),
        *torch._foreach_add([x, y], [y, x], alpha=s),
        *torch._foreach_sub([x, y], [s, 1.5]),
        *torch._foreach_mul([x, y], s),
        *torch._foreach_div([x, y], [2.0, s]),
        *torch._foreach_pow([y.abs()], s),
        *torch._foreach_lerp([x, y], [y, x], s),
        *torch._foreach_addcmul([x], [y], [x], s),
        *torch._foreach_addcdiv([x, x], [x, y], [y, y], [s, 0.5]),
        *torch._foreach_maximum([x, y], s),
        *torch._foreach_clamp_max([x, y], [s, 0.25]),
    ),
}


@pytest.mark.sample(usual=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_changing_float_gives_one_dynamic_graph(name: str, dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 3).to(dtype), torch.randn(3).to(dtype).abs().add(0.5)
    compiled = torch.compile(OPS[name], backend="dynaxla", fullgraph=True)
    torch._dynamo.utils.counters.clear()
    for number in (0.3, 1.7, 0.9, 2.6):
        for result, expected in zip(compiled(x, y, number), OPS[name](x, y, number), strict=True):
            assert_equal(result, expected)
    if KEEPS_FLOATS:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2, "a graph of the first number, then one graph for all numbers"


def test_floats_with_tensors_of_integers() -> None:
    """Eager mode truncates the number of addcmul, and refuses a float as alpha of booleans."""
    integers, booleans = torch.arange(4), torch.tensor([True, False])
    compiled = torch.compile(lambda x, s: torch.addcmul(x, x, x, value=s), backend="dynaxla", fullgraph=True)
    refused = torch.compile(lambda x, s: torch.add(x, x, alpha=s), backend="dynaxla", fullgraph=True)
    for number in (2.0, 3.0, 4.5):
        assert_equal(compiled(integers, number), torch.addcmul(integers, integers, integers, value=number))
        with pytest.raises(RuntimeError, match="argument alpha must not be a floating point number"):
            refused(booleans, number)


def test_operand_with_factor_zero_is_ignored() -> None:
    def function(x: torch.Tensor, y: torch.Tensor, s: float) -> list[torch.Tensor]:
        return [torch.addr(x, y, y, beta=s), torch.addr(x, y, y, beta=0, alpha=s)]

    x, y = torch.full((3, 3), float("nan")), torch.randn(3)
    compiled = torch.compile(function, backend="dynaxla", fullgraph=True)
    for number in (0.3, 1.7, 0.0):
        for result, expected in zip(compiled(x, y, number), function(x, y, number), strict=True):
            assert_equal(result, expected)


OPTIMIZERS = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "Adagrad", "ASGD", "RMSprop", "Rprop")


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_changing_learning_rate_gives_one_graph(name: str, foreach: bool) -> None:
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
    mine = copy.deepcopy(theirs)
    x = torch.randn(5, 3)
    for net, is_compiled in ((theirs, False), (mine, True)):
        optimizer = getattr(torch.optim, name)(net.parameters(), lr=0.02, foreach=foreach)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        step = torch.compile(optimizer.step, backend="dynaxla", options={"fallback": "error"}) if is_compiled else optimizer.step
        torch._dynamo.utils.counters.clear()
        for _ in range(5):
            net.zero_grad()
            net(x).square().sum().backward()
            step()
            schedule.step()
    torch.testing.assert_close(list(mine.parameters()), list(theirs.parameters()), rtol=2e-5, atol=2e-5)
    if KEEPS_FLOATS:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2, (
            "one graph creates the optimizer's state, and one is for all learning rates"
        )
