"""The context of a lowering: PRNG keys, checks and metadata. A nested graph has its own values and checks, and shares the rest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
import torch

from dynaxla.lowering import Context
from support.models.graph_builder import Builder

aten = torch.ops.aten


def bits(key: jax.Array) -> list[int]:
    found: list[int] = jax.random.key_data(key).tolist()
    return found


def test_keys_differ_and_a_nested_context_has_its_own() -> None:
    """Each call returns another key. A nested context derives keys from its own key, and does not advance the outer context."""
    plain, nesting = (Context("cpu", key=jax.random.key(0)) for _ in range(2))
    keys = [bits(plain.key()) for _ in range(3)]
    assert len({tuple(key) for key in keys}) == 3
    assert bits(nesting.key()) == keys[0]
    inner = nesting.nested(jax.random.key(1))
    assert bits(inner.key()) not in keys
    assert bits(nesting.key()) == keys[1]


def test_key_for_an_op_without_the_random_tag_raises() -> None:
    ctx = Context("cpu")
    ctx.node = Builder().call(aten.relu.default, 1)
    with pytest.raises(AssertionError, match="random numbers but lacks"):
        ctx.key()


def test_nested_context() -> None:
    """An inner context has its own values, checks and fused results. It shares the platform and the program's kernel calls."""
    ctx = Context("cpu")
    node = Builder().input(2)
    ctx.values[node] = jnp.ones(2)
    ctx.require(jnp.asarray(True), ValueError, "outer")
    inner = ctx.nested(None)
    assert (inner.values, list(inner.checks), node in inner.fused_results, inner.effect_token) == ({}, [], False, None)
    inner.require(jnp.asarray(True), ValueError, "inner")
    inner.values[node] = jnp.zeros(2)
    assert [check.message for check in ctx.checks] == ["outer"]
    assert ctx.values[node][0] == 1
    assert (inner.platform, inner.eager, inner.settings) == (ctx.platform, ctx.eager, ctx.settings)
    inner.kernels.append(("op", None))
    assert ctx.kernels == [("op", None)]


def test_metadata_of_the_node_and_its_arguments() -> None:
    build, ctx = Builder(), Context("cpu")
    x, y = build.input(2, 3), build.input(4)
    ctx.node = build.call(aten.cat.default, [x, y], 1, value=(build.fake(5), None))
    assert ctx.output[0].shape == (5,)
    assert ctx.output[1] is None
    assert [spec.shape for spec in ctx.input(0)] == [(2, 3), (4,)]
    assert ctx.input(1) == 1
    assert ctx.spec_of(x).shape == ctx.spec(x).shape == (2, 3)
    assert ctx.spec_of([1, 2]) == [1, 2]
