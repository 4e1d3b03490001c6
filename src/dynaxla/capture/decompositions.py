"""Which ops AOTAutograd takes apart: those of PyTorch's core decompositions that have no lowering of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._decomp import core_aten_decompositions
from torch._ops import OpOverload

from ..lowering import registry


def decompositions(platform: str) -> dict[OpOverload, Callable[..., Any]]:
    table = core_aten_decompositions()
    return {op: function for op, function in table.items() if isinstance(op, OpOverload) and registry.find(op, platform) is None}
