"""What tests of lowerings look at."""

from __future__ import annotations

from typing import Any

import pytest

from dynaxla.lowering.cpu import torch_kernels


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each implementation that is a call of torch's kernels, as they are traced."""
    found: list[int] = []

    def counted(write: torch_kernels.Write, *rest: Any) -> Any:
        found.append(1)
        return call(write, *rest)

    call = torch_kernels.call
    monkeypatch.setattr(torch_kernels, "call", counted)
    return found
