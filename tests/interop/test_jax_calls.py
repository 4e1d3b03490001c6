"""Tests of interop/jax_calls.py: the op that stands for a JAX function in torch's graphs."""

from __future__ import annotations

import gc

import jax.numpy as jnp
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dynaxla.errors import DynaxlaError
from dynaxla.interop.jax_calls import JaxCall, jax_call


def test_fake_results_are_like_real_ones() -> None:
    call = JaxCall(lambda x, y: [x @ y, jnp.argmax(x)], "product", False)
    operands = [torch.ones(2, 3), torch.ones(3, 4)]
    real = jax_call(operands, call.number)
    with FakeTensorMode() as mode:
        fake = jax_call([mode.from_tensor(operand) for operand in operands], call.number)
    assert [(item.shape, item.dtype, item.stride()) for item in fake] == [(item.shape, item.dtype, item.stride()) for item in real]


def test_traced_call_ignores_later_changes() -> None:
    scale = [2.0]
    call = JaxCall(lambda x: [x * scale[0]], "scaled", False).traced_call()
    assert jax_call([torch.ones(2)], call.number)[0].tolist() == [2, 2]
    scale[0] = 7.0
    assert jax_call([torch.ones(2)], call.number)[0].tolist() == [2, 2]


def test_deleted_call_raises() -> None:
    number = JaxCall(lambda x: [x], "gone", False).number
    gc.collect()
    with pytest.raises(DynaxlaError, match="no longer exists"):
        jax_call([torch.ones(2)], number)
