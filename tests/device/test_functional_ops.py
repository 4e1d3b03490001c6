"""Tests of the table of functional ops, which compute the values that in-place and out variants write."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dynaxla.device.functional_ops import functional_op_of, overload_for_numbers

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
    functional_op = functional_op_of(op)
    assert functional_op.functional == functional
    assert not functional_op.is_view


def test_written_and_out_arguments() -> None:
    assert functional_op_of(aten.max.dim_max).written == ("max", "max_values")
    assert functional_op_of(aten.max.dim_max).out_arguments == {"max", "max_values"}
    assert functional_op_of(aten.add_.Tensor).written == ("self",)
    assert functional_op_of(aten.arange.start_out).passes_dtype
    assert not functional_op_of(aten.add.out).passes_dtype


@pytest.mark.parametrize(
    "op", [aten.view.default, aten.t_.default, aten.squeeze_.dim, aten.as_strided_.default, aten.unfold.default, aten.view_as_real.default]
)
def test_views_have_no_functional_op(op: Any) -> None:
    assert functional_op_of(op).is_view
    assert functional_op_of(op).functional is None


def test_number_arguments() -> None:
    assert functional_op_of(aten.add_.Tensor).number_arguments >= {1, 2, "other", "alpha"}
    assert functional_op_of(aten.lerp_.Scalar).number_arguments >= {2, "weight"}
    for op in (aten.arange.start_out, aten.sum.dim_IntList, aten.native_dropout.default, aten.native_group_norm.default):
        assert not functional_op_of(op).number_arguments


def test_overloads_for_numbers() -> None:
    assert overload_for_numbers(aten.remainder.Tensor, (1,)) == aten.remainder.Scalar
    assert overload_for_numbers(aten.bitwise_and_.Tensor, (1,)) == aten.bitwise_and_.Scalar
    assert overload_for_numbers(aten.xlogy.Tensor, (0,)) == aten.xlogy.Scalar_Self
    assert overload_for_numbers(aten.mul.Tensor, (1,)) == aten.mul.Tensor
