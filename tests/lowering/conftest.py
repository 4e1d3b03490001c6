"""What tests of lowerings look at."""

from __future__ import annotations

import pytest

from support import internals


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each implementation that is a call of torch's kernels, as they are traced."""
    return internals.torch_kernel_calls(monkeypatch)
