"""The op `commit_if_ok` returns the new value if all checks before it hold, else the old value."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from jax import numpy as jnp

from dynaxla.lowering import Context
from dynaxla.lowering.ops.commit_if_ok import commit_if_ok, lower_commit_if_ok


@pytest.mark.parametrize("conditions", [[], [True], [False], [True, False], [False, True]])
def test_commit_if_ok(conditions: list[bool]) -> None:
    new, old = jnp.arange(3.0), -jnp.arange(3.0)

    def program(conditions: list[jax.Array]) -> jax.Array:
        ctx = Context("cuda")
        for condition in conditions:
            ctx.require(condition, IndexError, "")
        value = lower_commit_if_ok(new, old, ctx)
        ctx.require(jnp.array(False), IndexError, "a later check does not count")
        return value

    value = jax.jit(program)([jnp.array(condition) for condition in conditions])
    np.testing.assert_array_equal(value, new if all(conditions) else old)


def test_torch_kernel_returns_the_new_value() -> None:
    """torch's own checks raise before this op."""
    new = torch.ones(2)
    result = commit_if_ok(new, torch.zeros(2))
    assert result.tolist() == [1, 1]
    assert result.data_ptr() != new.data_ptr()
