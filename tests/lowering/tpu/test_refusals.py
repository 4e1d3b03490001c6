"""Functions for all platforms raise when JAX lowers an op for a TPU that XLA cannot compile for TPUs."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

import dynaxla
from dynaxla.errors import UnsupportedOp
from dynaxla.lowering.tpu.refusals import marked


@pytest.mark.parametrize("is_64_bit", [False, True])
def test_portable_function_raises_on_tpus(is_64_bit: bool) -> None:
    """JAX differentiates and batches the function before it lowers the function for a platform."""

    def pinv(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.pinv(x) + x

    with jax.enable_x64(is_64_bit):
        function, x = dynaxla.to_jax(pinv), jax.numpy.eye(3, dtype="float32")[None] * 2
        derivative = jax.grad(lambda x: jax.vmap(function)(x).sum())
        assert jax.jit(function)(x[0]).tolist() == (np.eye(3) * 2.5).tolist()
        assert np.diagonal(jax.jit(derivative)(x)[0]).tolist() == [0.75] * 3
        for program in (function, jax.vmap(function), derivative):
            with pytest.raises(UnsupportedOp, match=r"cannot compile it for the platform 'tpu'(?s:.*)in pinv"):
                jax.jit(program).trace(x).lower(lowering_platforms=("tpu",))


def test_marks_are_linear() -> None:
    def square(x: jax.Array) -> jax.Array:
        return marked(x, UnsupportedOp("it is refused")) ** 2

    assert jax.grad(square)(3.0) == 6
    assert jax.jvp(square, (3.0,), (2.0,)) == (9, 12)
    assert jax.vmap(square)(jax.numpy.arange(3)).tolist() == [0, 1, 4]
    with pytest.raises(UnsupportedOp, match="it is refused"):
        jax.jit(jax.grad(square)).trace(3.0).lower(lowering_platforms=("tpu",))
