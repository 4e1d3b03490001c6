"""Tests leave out what the installed torch lacks, and nothing else."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives  # it defines _c10d_functional's

from support.releases import NEWER, is_here, ops_here


def test_what_is_left_out() -> None:
    present = list(NEWER) if torch.__version__ >= (2, 12) else []
    assert [name for name in NEWER if is_here(name)] == present
    assert list(map(str, ops_here(*NEWER))) == present


def test_nothing_else_is_left_out() -> None:
    with pytest.raises(KeyError, match=r"aten\.add\.Tensr is in every torch"):
        is_here("aten.add.Tensr")
