"""Every test starts with a clean TorchDynamo and a known seed; deterministic threads; no cache directory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from speed import skip_guard_profile

torch.set_num_threads(1)
# What an earlier run left must not decide what this one tests.
os.environ["DYNAXLA_CACHE"] = ""
skip_guard_profile()


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
