"""Ops that came after the oldest torch that is tested. Where the installed one lacks them, no test names them."""

from __future__ import annotations

import operator
from typing import Any

import torch

# Names in torch.ops that torch 2.11 lacks, and 2.12 and later ones have.
NEWER = (
    "aten._upsample_lanczos2d_aa.default",
    "aten._upsample_lanczos2d_aa_backward.default",
    "_c10d_functional.isend.default",
)


def ops_here(*names: str) -> list[Any]:
    """Those of these newer ops that the installed torch has.

    names: of NEWER.
    """
    return [operator.attrgetter(name)(torch.ops) for name in names if is_here(name)]


def is_here(name: str) -> bool:
    """Whether the installed torch has one of NEWER."""
    if name not in NEWER:
        raise KeyError(f"{name} is in every torch that is tested, or is not listed")
    try:
        operator.attrgetter(name)(torch.ops)
    except AttributeError:
        return False
    return True
