"""What is known of the values of a graph that is rewritten, and what is added to it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.passes.padding.masks import Masks
from dynaxla.passes.padding.valid_sizes import Extent, NoPaddingRule, size_of


def rewriting(count: int = 1) -> tuple[Masks, Node, Any]:
    """A graph of x.exp(), x, and the symbol of x's first size."""
    module = make_fx(lambda x: x.exp(), tracing_mode="symbolic")(torch.zeros(5, 7))
    (x,) = module.graph.find_nodes(op="placeholder")
    symbol = size_of(x.meta["val"].shape[0])
    masks = Masks(module, {symbol}, torch.device("cpu"))
    masks.node = module.graph.find_nodes(op="call_function", target=torch.ops.aten.exp.default)[0]
    masks.extents[x] = masks.prefixes(x.meta["val"])
    return masks, x, symbol


def test_only_rounded_sizes_are_padded() -> None:
    masks, x, _ = rewriting()
    assert masks.padded_dims(x) == [0]
    assert masks.is_concerned(masks.node)
    assert not masks.is_rounded(x.meta["val"].shape[1])
    with pytest.raises(NoPaddingRule, match="a dynamic size as a number"):
        masks.exact([3, x.meta["val"].shape[0]])


def test_a_mask_is_made_once_for_each_number() -> None:
    masks, x, symbol = rewriting()
    first = masks.masked(x, [0, 1], 0)
    assert masks.masked(x, [0], 0) is first
    assert masks.masked(x, [0], 0.0) is not first  # -0, 0 and False are different numbers
    assert masks.masked(x, [1], 0) is x
    assert masks.sizes == [symbol]
    masks.extents[x] = (Extent((symbol,), uniform=True), Extent(()))
    assert not masks.of(masks.masked(x, [0], 1))[0].uniform


def test_a_position_that_may_shrink_is_unknown() -> None:
    masks, _, symbol = rewriting()
    assert [masks.place(size) for size in (symbol, symbol + 1, symbol)] == [0, 1, 0]
    with pytest.raises(NoPaddingRule):
        masks.place(3 - symbol)
