"""Marks for tests of ops and behaviour that torch 2.11, the oldest tested release, lacks."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch

IS_OLDEST = torch.__version__ < (2, 12)


def fails_in_oldest(reason: str) -> pytest.MarkDecorator:
    """Marks a test that fails in torch 2.11 itself.

    Args:
        reason: the defect of torch 2.11.
    """
    return pytest.mark.xfail(IS_OLDEST, reason=f"torch 2.11: {reason}", strict=True)


def not_in_oldest(reason: str) -> pytest.MarkDecorator:
    """Marks a test of a feature that torch 2.11 lacks.

    Args:
        reason: the missing feature.
    """
    return pytest.mark.skipif(IS_OLDEST, reason=f"torch 2.11 has no {reason}")


def cases(names: Iterable[str], fails: Mapping[str, str]) -> list[Any]:
    """Returns parameters of a test, some of which fail in torch 2.11 itself.

    Args:
        names: the parameters.
        fails: the defects of torch 2.11, by parameter.
    """
    return [pytest.param(name, marks=[fails_in_oldest(fails[name])] if name in fails else []) for name in names]


# Ops that torch 2.11 lacks, and torch 2.12 and later have.
NEWER = (
    "aten._upsample_lanczos2d_aa.default",
    "aten._upsample_lanczos2d_aa_backward.default",
    "_c10d_functional.isend.default",
)


def ops_here(*names: str) -> list[Any]:
    """Returns the ops that the installed torch has.

    Args:
        names: names in NEWER.
    """
    return [operator.attrgetter(name)(torch.ops) for name in names if is_here(name)]


def is_here(name: str) -> bool:
    """True if the installed torch has this op of NEWER."""
    if name not in NEWER:
        raise KeyError(f"{name} is in every torch that is tested, or is not listed")
    try:
        operator.attrgetter(name)(torch.ops)
    except AttributeError:
        return False
    return True
