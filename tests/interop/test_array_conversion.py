"""Tests of interop/array_conversion.py: tensors as arrays during a call of a JAX function."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch

from dynaxla.errors import UnsupportedTensor
from dynaxla.interop.array_conversion import ArrayScope, unshareable_reason, x64_enabled


def test_arrays_share_the_memory_of_contiguous_tensors() -> None:
    tensors = [torch.ones(3, 4), torch.ones(4, 3).t(), torch.ones(0)]
    with ArrayScope(tensors, "f", False) as scope:
        assert scope.arrays[0].unsafe_buffer_pointer() == tensors[0].data_ptr()
        assert scope.arrays[1].unsafe_buffer_pointer() != tensors[1].data_ptr()
        assert [array.shape for array in scope.arrays] == [(3, 4), (3, 4), (0,)]


def test_x64_setting_is_restored() -> None:
    before = x64_enabled()
    with ArrayScope([torch.ones(2)], "f", not before):
        assert x64_enabled() is not before
    assert x64_enabled() is before


def test_results_with_other_references_are_copied() -> None:
    referenced = jnp.ones(3) + 0
    with ArrayScope([], "f", False) as scope:
        (result,) = scope.to_tensors([referenced])
        (alone,) = scope.to_tensors([jnp.ones(3) * 2])
    result.zero_()
    assert referenced.tolist() == [1, 1, 1]
    assert alone.tolist() == [2, 2, 2]


def test_leaked_tracer_raises() -> None:
    def f(x: jax.Array) -> jax.Array:
        with ArrayScope([torch.ones(2)], "f", False) as scope:
            scope.to_tensors([x])
        return x

    with pytest.raises(UnsupportedTensor, match="f was called with tensors that hold no tracers, but returned a JAX tracer"):
        jax.jit(f)(jnp.ones(2))


def test_unshareable_reason() -> None:
    assert unshareable_reason(torch.ones(3)) == ""
    assert "strides" in unshareable_reason(torch.ones(3, 2).t())
