"""Traced numbers: arithmetic on stand-ins is done again with true values, and what looks at a stand-in's value is told so."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dynaxla.training.scalars import TracedFloat, TracedFloatInspected, TracedFloats, op_with_traced_floats

aten = torch.ops.aten
LR, DECAY = ("group", "lr"), ("group", "decay")

FORMULAS: dict[str, Callable[[Any, Any], Any]] = {
    "step": lambda lr, decay: 1 - lr * decay,
    "both sides": lambda lr, decay: (2 / lr - 3) ** decay,
    "signs": lambda lr, decay: -lr + abs(-decay) + +lr,
    "rests": lambda lr, decay: lr % decay + 7 % lr + lr // decay + 2**lr,
    "sum": lambda lr, decay: sum([lr, decay, lr]),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas(name: str) -> None:
    """Whatever the stand-ins were."""
    for seed in (0, 1):
        numbers = TracedFloats(seed)
        made = FORMULAS[name](numbers.at(LR, 0.1), numbers.at(DECAY, 0.1))
        assert isinstance(made, TracedFloat)
        for values in ({LR: 0.25, DECAY: 0.5}, {LR: 3.0, DECAY: 2.0}):
            assert made.compute(values.__getitem__) == FORMULAS[name](values[LR], values[DECAY])


def test_a_number_is_known_by_its_value() -> None:
    """As C++ hands it on, a plain float; the same formula is the same number."""
    numbers = TracedFloats(0)
    lr = numbers.at(LR, 0.1)
    assert isinstance(lr, TracedFloat)
    assert numbers.at(LR, 0.2) is lr
    assert (lr * 2 is lr * 2, lr * 2 is lr * 3) == (True, False)
    plain = torch.utils._pytree.tree_map(float.__float__, lr * 2)
    assert type(plain) is float
    assert numbers.find(plain) is lr * 2
    assert numbers.find(0.5) is None
    assert numbers.find(1) is None
    assert float.__float__(TracedFloats(1).add(LR, lambda read: read(LR))) != float.__float__(lr), (
        "what comes through unseen differs between two recordings"
    )


@pytest.mark.parametrize("look", [bool, int, round, math.floor, math.ceil, lambda x: x > 0, lambda x: x == 1, lambda x: x in (1, 2)])
def test_looking(look: Callable[[Any], Any]) -> None:
    with pytest.raises(TracedFloatInspected):
        look(TracedFloats(0).at(LR, 0.1))


def test_comparing_with_zero() -> None:
    """All numbers but learning rates are positive as long as the guards hold; a comparison with another number needs the value."""
    decay = TracedFloats(0).at(DECAY, 0.1)
    assert [bool(decay), decay == 0, decay != 0, decay > 0, decay >= 0, decay < 0, decay <= 0.0] == [
        True,
        False,
        True,
        True,
        True,
        False,
        False,
    ]
    with pytest.raises(TracedFloatInspected) as caught:
        assert decay > 0.5
    assert caught.value.places == {DECAY}
    with pytest.raises(TracedFloatInspected):
        assert -decay < 0


def test_tuples() -> None:
    betas = TracedFloats(0).at(("group", "betas"), (0.9, 0.99))
    assert isinstance(betas, tuple)
    assert [(1 - beta).compute({("group", "betas"): (0.5, 0.75)}.__getitem__) for beta in betas] == [0.5, 0.25]


def number(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64)


X, Y = torch.tensor([1.5, -2.0]), torch.tensor([0.25, 3.0])
CALLS: dict[Any, list[tuple[Any, ...]]] = {
    aten.add.Tensor: [(X, 0.3), (X.bfloat16(), 0.3), (X.int(), 0.5)],
    aten.add.Scalar: [(X, 0.3, 2), (X.int(), 0.5, 2), (X[0], 0.3, 2)],
    aten.sub.Tensor: [(X, 0.3)],
    aten.rsub.Scalar: [(X, 0.3)],
    aten.mul.Tensor: [(X, 0.3), (X.half(), 0.3), (X.int(), 0.5), (X.to(torch.complex64), 0.3)],
    aten.div.Tensor: [(X, 0.3), (X.bfloat16(), 0.3)],
    aten.lerp.Scalar: [(X, Y, 0.3)],
    aten.mul_.Tensor: [(X, 0.3)],
    aten.fill_.Scalar: [(X, 0.3), (X.bfloat16(), 0.3)],
    aten.full_like.default: [(X, 0.3)],
    aten.pow.Tensor_Scalar: [(Y, 0.3), (Y.bfloat16(), 0.3), (Y[0], 0.3)],
    aten.pow.Scalar: [(0.3, X), (0.3, X.half()), (0.3, X[0])],
}


@pytest.mark.parametrize("op", CALLS, ids=str)
def test_rules_are_the_ops(op: Any) -> None:
    """With the number in a float64 tensor: of the same dtype, and the same up to a rounding."""
    for args in CALLS[op]:
        copies = [tuple(arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args) for _ in range(2)]
        expected = op(*copies[0])
        traced = op_with_traced_floats(op)
        assert traced is not None
        found = traced(*(number(arg) if isinstance(arg, float) else arg for arg in copies[1]))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(copies[1][0], copies[0][0])


def test_keywords_and_lists() -> None:
    add, addcdiv, each = (
        op_with_traced_floats(aten.add.Tensor),
        op_with_traced_floats(aten.addcdiv.default),
        op_with_traced_floats(aten._foreach_mul_.Scalar),
    )
    assert add is not None
    assert addcdiv is not None
    assert each is not None
    torch.testing.assert_close(add(X, Y, alpha=number(0.3)), torch.add(X, Y, alpha=0.3))
    torch.testing.assert_close(addcdiv(X, Y, X, value=number(0.3)), torch.addcdiv(X, Y, X, value=0.3))
    tensors = [X.clone(), Y.clone()]
    each(tensors, number(0.3))
    torch.testing.assert_close(tensors, [X * 0.3, Y * 0.3])
    one_each = op_with_traced_floats(aten._foreach_mul.ScalarList)
    assert one_each is not None
    torch.testing.assert_close(one_each([X, Y], [number(0.3), 2.0]), [X * 0.3, Y * 2])


@pytest.mark.parametrize("op", [aten.mul.out, aten.div.Tensor_mode, aten.hypot.default, torch.ops.prims.add.default], ids=str)
def test_ops_without_a_rule(op: Any) -> None:
    assert op_with_traced_floats(op) is None
