"""Tensors as arrays while a JAX function runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch

from dynaxla.errors import UnsupportedTensor
from dynaxla.interop.array_conversion import ArrayScope, unshareable_reason, x64_enabled


def test_arrays_lie_in_the_tensors_memory() -> None:
    tensors = [torch.ones(3, 4), torch.ones(4, 3).t(), torch.ones(0)]
    with ArrayScope(tensors, "f", False) as border:
        assert border.arrays[0].unsafe_buffer_pointer() == tensors[0].data_ptr()
        assert border.arrays[1].unsafe_buffer_pointer() != tensors[1].data_ptr()
        assert [array.shape for array in border.arrays] == [(3, 4), (3, 4), (0,)]


def test_settings_hold_inside_alone() -> None:
    before = x64_enabled()
    with ArrayScope([torch.ones(2)], "f", not before):
        assert x64_enabled() is not before
    assert x64_enabled() is before


def test_what_is_referred_to_elsewhere_is_copied() -> None:
    kept = jnp.ones(3) + 0
    with ArrayScope([], "f", False) as border:
        (result,) = border.to_tensors([kept])
        (alone,) = border.to_tensors([jnp.ones(3) * 2])
    result.zero_()
    assert kept.tolist() == [1, 1, 1]
    assert alone.tolist() == [2, 2, 2]


def test_a_tracer_that_leaks_in() -> None:
    def f(x: jax.Array) -> jax.Array:
        with ArrayScope([torch.ones(2)], "f", False) as border:
            border.to_tensors([x])
        return x

    with pytest.raises(UnsupportedTensor, match="f was called with tensors outside of JAX, and returned a JAX tracer"):
        jax.jit(f)(jnp.ones(2))


def test_reasons() -> None:
    assert unshareable_reason(torch.ones(3)) == ""
    assert "strides" in unshareable_reason(torch.ones(3, 2).t())
