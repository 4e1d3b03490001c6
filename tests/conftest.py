"""Every test starts with a clean TorchDynamo and a known seed; deterministic threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from speed import skip_guard_profile

torch.set_num_threads(1)
skip_guard_profile()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
