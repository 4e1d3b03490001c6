"""Marks for tests of ops and behaviour that torch 2.11, the oldest tested release, lacks."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

IS_OLDEST = torch.__version__ < (2, 12)


def fails_in_oldest(reason: str) -> pytest.MarkDecorator:
    """For a test that torch 2.11 itself fails. reason: what is wrong with it."""
    return pytest.mark.xfail(IS_OLDEST, reason=f"torch 2.11: {reason}", strict=True)


def not_in_oldest(reason: str) -> pytest.MarkDecorator:
    """For a test of what torch 2.11 does not have. reason: what that is."""
    return pytest.mark.skipif(IS_OLDEST, reason=f"torch 2.11 has no {reason}")


def cases(names: Iterable[str], fails: Mapping[str, str]) -> list[Any]:
    """Parameters of a test, some of which torch 2.11 itself fails. fails: what is wrong with it, by name."""
    return [pytest.param(name, marks=[fails_in_oldest(fails[name])] if name in fails else []) for name in names]


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
