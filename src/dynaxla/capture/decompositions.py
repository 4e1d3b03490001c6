"""Which ops AOTAutograd takes apart: those of PyTorch's core decompositions that have no lowering of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload

from ..lowering import registry


def decompositions(platform: str) -> dict[OpOverload, Callable[..., Any]]:
    return dict(_without_lowering(platform, len(registry)))


@functools.lru_cache(maxsize=4)
def _without_lowering(platform: str, registered: int) -> dict[OpOverload, Callable[..., Any]]:
    """registered: how many lowerings there are; with one more, the table is another."""
    return {op: function for op, function in _core_decompositions() if registry.find(op, platform) is None}


@functools.cache
def _core_decompositions() -> tuple[tuple[OpOverload, Callable[..., Any]], ...]:
    """Those of overloads; torch takes tens of milliseconds to collect them. Composite ops defined later are taken apart without them."""
    return tuple((op, function) for op, function in core_aten_decompositions().items() if isinstance(op, OpOverload))
