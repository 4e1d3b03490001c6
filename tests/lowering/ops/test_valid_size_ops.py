"""Ops for rounded sizes, which use the true sizes: results do not depend on the padding."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest
import torch

from dynaxla.lowering.context import Context
from dynaxla.lowering.ops.valid_size_ops import (
    as_tuple,
    cat_valid,
    check_index,
    masked,
    reflect_or_replicate,
    reflect_or_replicate_backward,
    repeat_last,
    roll_or_flip,
    size_product,
    slice_at,
    write_into,
    write_into_zeros,
)
from dynaxla.lowering.registry import registry

LENGTHS = np.array([2, 3])


def call(op: Any, *args: Any, **kwargs: Any) -> Any:
    with jax.enable_x64(True):
        rule = registry.find(op, "cpu")
        assert rule is not None
        arrays = [jax.numpy.asarray(item) if isinstance(item, np.ndarray) else item for item in args]
        return rule.function(*arrays, **kwargs)


def test_masked_replaces_the_padding() -> None:
    x = np.arange(24, dtype=np.float32).reshape(2, 12)
    result = call(masked, x, LENGTHS, 1, [3, 4], [0, 1], -math.inf)
    is_valid = np.zeros((2, 3, 4), bool)
    is_valid[:, :2, :3] = True
    np.testing.assert_array_equal(result, np.where(is_valid.reshape(2, 12), x, -np.inf))
    is_valid[:, :, :3] = True
    np.testing.assert_array_equal(call(masked, x, LENGTHS, 1, [3, 4], [-1, 1], 7), np.where(is_valid.reshape(2, 12), x, 7))
    np.testing.assert_array_equal(call(masked, x[:, :4] > 0, LENGTHS, 1, [4], [0], True), [[False, True, True, True], [True] * 4])


def test_cat_valid_and_size_product() -> None:
    a, b = np.arange(4, dtype=np.float32), np.arange(10, 15, dtype=np.float32)
    np.testing.assert_array_equal(call(cat_valid, [*map(jax.numpy.asarray, (a, b))], LENGTHS, 0, [0])[:5], [0, 1, 10, 11, 12])
    assert int(call(size_product, LENGTHS, [0, 1, 1], 5)) == 90


def test_slices_at_a_true_position() -> None:
    class FakeContext:
        class output:
            shape = (2,)

    np.testing.assert_array_equal(call(slice_at, np.arange(6), LENGTHS, 0, 1, ctx=FakeContext()), [3, 4])
    FakeContext.output.shape = (6,)
    np.testing.assert_array_equal(call(write_into_zeros, np.array([7, 8]), LENGTHS, 0, 1, ctx=FakeContext()), [0, 0, 0, 7, 8, 0])


@pytest.mark.parametrize(("from_end", "index", "holds"), [(True, [-3, 2], True), (True, [3, 0], False), (False, [-1, 0], False)])
def test_indices_are_checked_against_the_true_size(from_end: bool, index: list[int], holds: bool) -> None:
    ctx = Context("cpu")
    indices = call(check_index, np.array(index), LENGTHS, 0, 1, from_end, True, ctx=ctx)
    assert bool(ctx.checks[0].condition) == holds
    assert ctx.checks[0].error is IndexError
    if holds:
        np.testing.assert_array_equal(indices, [0, 2])


@pytest.mark.parametrize(("shift", "is_flip", "expected"), [(1, False, [2, 0, 1]), (-4, False, [1, 2, 0]), (0, True, [2, 1, 0])])
def test_roll_and_flip_of_the_valid_elements(shift: int, is_flip: bool, expected: list[int]) -> None:
    np.testing.assert_array_equal(call(roll_or_flip, np.arange(5), LENGTHS, 0, 1, shift, is_flip)[:3], expected)


def test_last_valid_element_is_repeated() -> None:
    np.testing.assert_array_equal(call(repeat_last, np.arange(10).reshape(2, 5), LENGTHS, 1, 0), [[0, 1, 1, 1, 1], [5, 6, 6, 6, 6]])


@pytest.mark.parametrize("mode", ["reflect", "replicate"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (-1, 1), (2, -2)])
def test_reflection_and_replication_at_the_true_size(mode: str, before: int, after: int) -> None:
    class FakeContext:
        class output:
            shape = (2, 6)

    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    valid = torch.from_numpy(x[:, :3].copy()).requires_grad_()
    expected = torch.nn.functional.pad(valid, (before, after), mode=mode)
    arguments = LENGTHS, 1, 1, before, mode == "reflect"
    result = call(reflect_or_replicate, x, *arguments, ctx=FakeContext())[:, : expected.shape[1]]
    np.testing.assert_array_equal(result, expected.detach())
    grad = np.zeros((2, 6), np.float32)
    grad[:, : expected.shape[1]] = np.arange(expected.numel()).reshape(expected.shape)
    (expected_grad,) = torch.autograd.grad(expected, valid, torch.from_numpy(grad[:, : expected.shape[1]]))
    FakeContext.output.shape = (2, 5)
    np.testing.assert_array_equal(call(reflect_or_replicate_backward, grad, *arguments, ctx=FakeContext())[:, :3], expected_grad)


def test_valid_elements_are_written_into_another_array() -> None:
    x, added = np.zeros(6, np.int64), np.arange(1, 5)
    np.testing.assert_array_equal(call(write_into, x, added, LENGTHS, 0, 0, 0, 1, 0), [0, 0, 1, 2, 3, 0])
    np.testing.assert_array_equal(call(write_into, x, added, LENGTHS, 0, -1, 1, -1, 2), [0, 1, 2, 0, 0, 0])
    np.testing.assert_array_equal(call(write_into, x, added[:0], LENGTHS, 0, 0, 0, 1, 0), x)


def test_as_tuple() -> None:
    x = np.arange(2)
    result, missing = call(as_tuple, [x, None])
    assert result is x
    assert missing is None


def test_torch_has_no_kernels_for_these_ops() -> None:
    with pytest.raises(NotImplementedError):
        size_product(torch.tensor([1]), [0], 1)
