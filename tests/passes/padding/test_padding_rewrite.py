"""Tests of passes/padding/padding_rewrite.py: the known extents of a graph's values, and the masks and sizes that are added."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.passes.padding.padding_rewrite import PaddingRewrite
from dynaxla.passes.padding.valid_sizes import Extent, NoPaddingRule, size_of


def rewriting() -> tuple[PaddingRewrite, Node, Any]:
    """Returns the rewrite of a graph of x.exp(), the placeholder x, and the symbol of x's first size."""
    module = make_fx(lambda x: x.exp(), tracing_mode="symbolic")(torch.zeros(5, 7))
    (x,) = module.graph.find_nodes(op="placeholder")
    symbol = size_of(x.meta["val"].shape[0])
    rewrite = PaddingRewrite(module, {symbol}, torch.device("cpu"))
    rewrite.node = module.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)[0]
    rewrite.extents[x] = rewrite.prefixes(x.meta["val"])
    return rewrite, x, symbol


def test_only_rounded_sizes_are_padded() -> None:
    rewrite, x, _ = rewriting()
    assert list(map(rewrite.is_padded, rewrite.extents_of(x))) == [True, False]
    assert rewrite.involves_rounded_sizes(rewrite.node)
    assert not rewrite.is_rounded(x.meta["val"].shape[1])
    with pytest.raises(NoPaddingRule, match="a dynamic size as a number"):
        rewrite.require_exact([3, x.meta["val"].shape[0]])


def test_one_mask_for_each_fill_value() -> None:
    rewrite, x, symbol = rewriting()
    first = rewrite.masked(x, [0, 1], 0)
    assert rewrite.masked(x, [0], 0) is first
    assert rewrite.masked(x, [0], 0.0) is not first  # -0, 0 and False are different numbers
    assert rewrite.masked(x, [1], 0) is x
    assert rewrite.true_size_expressions == [symbol]
    rewrite.extents[x] = (Extent((symbol,), uniform=True), Extent(()))
    assert not rewrite.extents_of(rewrite.masked(x, [0], 1))[0].uniform


def test_size_that_may_shrink_raises() -> None:
    rewrite, _, symbol = rewriting()
    assert [rewrite.true_size_index(size) for size in (symbol, symbol + 1, symbol)] == [0, 1, 0]
    with pytest.raises(NoPaddingRule):
        rewrite.true_size_index(3 - symbol)
