"""The helpers for ops that the installed torch lacks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives  # defines the ops of _c10d_functional

from support.releases import NEWER, is_here, ops_here


def test_newer_ops_are_left_out_in_oldest_torch() -> None:
    present = list(NEWER) if torch.__version__ >= (2, 12) else []
    assert [name for name in NEWER if is_here(name)] == present
    assert list(map(str, ops_here(*NEWER))) == present


def test_unlisted_op_raises() -> None:
    with pytest.raises(KeyError, match=r"aten\.add\.Tensr is in every torch"):
        is_here("aten.add.Tensr")
