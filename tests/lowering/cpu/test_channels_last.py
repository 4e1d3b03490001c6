"""The channels-last memory order: of activations between convolutions, and of a node's operand in the program."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
import torch
from torch.fx import Node

from dynaxla.lowering import Context
from dynaxla.lowering.cpu.channels_last import channels_first, channels_last, order_between_convolutions, order_in_program
from support.models.graph_builder import Builder

aten = torch.ops.aten


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6)])
def test_channels_last_and_back(shape: tuple[int, ...]) -> None:
    x = jnp.arange(float(torch.Size(shape).numel())).reshape(shape)
    moved = channels_last(x)
    assert moved.shape == (shape[0], *shape[2:], shape[1])
    assert (channels_first(moved) == x).all()
    order = order_between_convolutions(len(shape), "cpu")
    assert order is not None
    assert moved.shape == tuple(shape[dim] for dim in order)
    assert order_between_convolutions(len(shape), "cuda") is None


def order_of(node: Node, build: Builder) -> tuple[int, ...]:
    ctx = Context("cpu")
    ctx.node = build.call(aten.relu.default, node)
    return order_in_program(ctx)


def test_order_in_program() -> None:
    """An input has the caller's order, and a convolution's result is channels-last. Other results have the order of their first operand of
    the same rank."""
    build = Builder()
    contiguous, permuted = build.input(2, 3, 4, 5), build.input(2, 3, 4, 5)
    permuted.meta["val"] = build.fake(2, 4, 5, 3).permute(0, 3, 1, 2)
    scale = build.input(3)
    convolved = build.call(aten.convolution.default, contiguous, scale, value=build.fake(2, 3, 4, 5))
    row_major, channels_last_order = (0, 1, 2, 3), (0, 2, 3, 1)
    for source, expected in ((contiguous, row_major), (permuted, channels_last_order), (convolved, channels_last_order)):
        assert order_of(source, build) == expected
        results = build.call(aten.native_batch_norm.default, scale, source, value=(build.fake(2, 3, 4, 5), build.fake(3)))
        first = build.call(aten.alias.default, results, value=build.fake(2, 3, 4, 5))
        assert order_of(first, build) == expected
    expanded = build.call(aten.expand.default, scale, value=build.fake(2, 3, 4, 5))
    assert order_of(expanded, build) == row_major
