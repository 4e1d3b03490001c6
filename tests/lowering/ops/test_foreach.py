"""Ops on lists of tensors, and the optimizers made of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import check

from dynaxla.observe import coverage

aten = torch.ops.aten

# torch's own shape propagation reads the values of the last argument of these, so that no graph can hold them.
READ_VALUES = {aten._foreach_addcmul.Tensor, aten._foreach_addcdiv.Tensor}


def overloads() -> list[torch._ops.OpOverload]:
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::_foreach_"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(aten, base), overload or "default")
            if not op._schema.is_mutable and op not in READ_VALUES:
                found.append(op)
    return sorted(found, key=str)


def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype) if dtype.is_floating_point else torch.randint(0, 5, shape).to(dtype)


def samples(op: torch._ops.OpOverload, dtypes: tuple[torch.dtype, ...]) -> tuple[list[Any], dict[str, Any]]:
    """Lists of a transposed matrix of the first dtype, and a rank-0 tensor of the second."""
    args: list[Any] = []
    keywords: dict[str, Any] = {}
    matrix, scalar = dtypes
    for argument in op._schema.arguments:
        kind = str(argument.type)
        if kind == "List[Tensor]":
            if op is aten._foreach_mm.default:
                args.append([random((3, 3), matrix).t(), random((3, 3), scalar)])
            elif op is aten._foreach_pow.ScalarAndTensor:  # torch's shape propagation does not give eager's strides
                args.append([random((2, 3), matrix), random((), scalar)])
            else:
                args.append([random((3, 2), matrix).t(), random((), scalar)])
        elif kind == "List[number]":
            args.append([0.25, 2] if matrix.is_floating_point else [3, 1])
        elif kind == "Tensor":
            args.append(random((), matrix))
        elif argument.name == "alpha":
            keywords["alpha"] = 2
        elif kind == "number":
            args.append(2 if argument.name == "ord" else 0.7 if matrix.is_floating_point else 3)
    return args, keywords


@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.int64, torch.bool)], ids=["floats", "integers"])
def test_every_overload_as_eager_has_it(dtypes: tuple[torch.dtype, ...]) -> None:
    calls = []
    for op in overloads():
        args, keywords = samples(op, dtypes)
        try:
            op(*args, **keywords)
        except (RuntimeError, NotImplementedError):
            continue
        calls.append((op, keywords, args))
    assert len(calls) > 40

    def function(every: list[Any]) -> list[Any]:
        return [list(op(*args, **keywords)) for (op, keywords, _), args in zip(calls, every, strict=True)]

    check(function, [args for _, _, args in calls], calls=1)


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


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_compiled_optimizers_step_as_eager_ones(name: str, foreach: bool) -> None:
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
