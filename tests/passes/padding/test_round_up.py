"""Tests of passes/padding/round_up.py: sizes are rounded up unless a guard on sizes forbids it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dynaxla.passes.padding.round_up import Rounding, round_up_size


def test_rounded_sizes() -> None:
    assert [round_up_size(size) for size in (0, 1, 2, 3, 5, 6, 7, 9, 12, 13, 17, 33, 48, 49, 500, 512)] == [
        0, 1, 2, 3, 6, 6, 8, 12, 12, 16, 24, 48, 48, 64, 512, 512,
    ]  # fmt: skip


def rounding(function: Callable[[torch.Tensor], object], size: int) -> int | None:
    """Returns the rounded size of a traced function's input; None if the size cannot be rounded."""
    module = make_fx(lambda x: x if function(x) else x + 1, tracing_mode="symbolic")(torch.zeros(size, 4))
    (symbolic, _) = module.graph.find_nodes(op="placeholder")[0].meta["val"].shape
    symbol = symbolic.node.expr
    found = Rounding(symbolic.node.shape_env, [symbol])({symbol: size})
    return None if found is None else found[symbol]


def test_rounded_sizes_satisfy_guards() -> None:
    assert rounding(lambda x: True, 9) == 12
    assert rounding(lambda x: x.shape[0] % 4 == 0, 20) == 24
    assert rounding(lambda x: x.shape[0] % 5 == 0, 20) is None
    assert rounding(lambda x: x.shape[0] < 100, 70) is not None
    assert rounding(lambda x: x.shape[0] != 12, 9) is None
    # The largest size that a guard allows takes the place of a larger bucket.
    assert rounding(lambda x: x.shape[0] < 11, 9) == 10
