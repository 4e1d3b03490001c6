"""Which op gives the values that another one writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynaxla.device.counterparts import for_numbers, form_of

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("op", "functional"),
    [
        (aten.add.Tensor, aten.add.Tensor),
        (aten.add_.Tensor, aten.add.Tensor),
        (aten.add.out, aten.add.Tensor),
        (aten.max.dim_max, aten.max.dim),
        (aten.fill_.Scalar, aten.fill.Scalar),
        (aten.normal_.default, aten.normal_functional.default),
        (aten.bernoulli_.float, aten.bernoulli.p),
        (aten.arange.start_out, aten.arange.start_step),
    ],
)
def test_functional_ops(op: Any, functional: Any) -> None:
    form = form_of(op)
    assert form.functional == functional
    assert not form.is_view


def test_what_is_written_and_left_out() -> None:
    assert form_of(aten.max.dim_max).written == ("max", "max_values")
    assert form_of(aten.max.dim_max).dropped == {"max", "max_values"}
    assert form_of(aten.add_.Tensor).written == ("self",)
    assert form_of(aten.arange.start_out).gives_dtype
    assert not form_of(aten.add.out).gives_dtype


@pytest.mark.parametrize(
    "op", [aten.view.default, aten.t_.default, aten.squeeze_.dim, aten.as_strided_.default, aten.unfold.default, aten.view_as_real.default]
)
def test_views_compute_nothing(op: Any) -> None:
    assert form_of(op).is_view
    assert form_of(op).functional is None


def test_which_arguments_are_inputs() -> None:
    assert form_of(aten.add_.Tensor).numbers >= {1, 2, "other", "alpha"}
    assert form_of(aten.lerp_.Scalar).numbers >= {2, "weight"}
    for op in (aten.arange.start_out, aten.sum.dim_IntList, aten.native_dropout.default, aten.native_group_norm.default):
        assert not form_of(op).numbers


def test_overloads_for_numbers() -> None:
    assert for_numbers(aten.remainder.Tensor, (1,)) == aten.remainder.Scalar
    assert for_numbers(aten.bitwise_and_.Tensor, (1,)) == aten.bitwise_and_.Scalar
    assert for_numbers(aten.xlogy.Tensor, (0,)) == aten.xlogy.Scalar_Self
    assert for_numbers(aten.mul.Tensor, (1,)) == aten.mul.Tensor
