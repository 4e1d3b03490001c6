"""Tests that the names in the help are those of the tables, which the help does not import."""

from __future__ import annotations

import torch

from dynaxla.bench import choices, engines, suites, training
from dynaxla.interop.export import PLATFORMS


def test_names_in_the_help_equal_the_tables() -> None:
    assert list(choices.MODELS) == [case.name for case in suites.MODELS]
    assert list(choices.SUITES) == list(suites.SUITES)
    assert list(choices.ENGINES) == list(engines.ENGINES)
    assert list(choices.OPTIMIZERS) == list(training.OPTIMIZERS)
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in choices.DTYPES)
    assert choices.PLATFORMS == PLATFORMS
