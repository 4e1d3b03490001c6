"""Fixtures for the tests of lowerings."""

from __future__ import annotations

import pytest

from support import internals


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list with an entry for each traced call of torch's kernels from a program."""
    return internals.torch_kernel_calls(monkeypatch)
