"""Padding by a constant, by reflection, by replication, and circular."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from support.comparisons.gradients import check_gradients

PADDINGS = {
    "constant": lambda x: (F.pad(x, (1, 2)), F.pad(x, (1, -1, 0, 2, -2, 0), value=3), F.pad(x, ())),
    "reflected": lambda x: (F.pad(x, (2, 1), mode="reflect"), F.pad(x, (1, 0, 5, 2), mode="reflect"), F.pad(x, (-2, 2), mode="reflect")),
    "replicated": lambda x: (F.pad(x, (2, 4), mode="replicate"), F.pad(x[None], (1, 0, -5, 7), mode="replicate")),
    "in three dimensions": lambda x: (
        F.pad(x[None], (1, 2, 0, 3, 1, 1), mode="reflect"),
        F.pad(x[None], (1, 2, 0, 3, 9, 1), mode="replicate"),
    ),
    "circular": lambda x: F.pad(x, (2, 1), mode="circular"),
}


@pytest.mark.parametrize("case", PADDINGS)
def test_padding(case: str) -> None:
    check_gradients(PADDINGS[case], torch.randn(4, 6, 3))
