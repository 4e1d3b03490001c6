"""Every test starts with a clean TorchDynamo and a known seed; deterministic threads; no cache directory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings
from speed import skip_guard_profile

torch.set_num_threads(1)
# What an earlier run left must not decide what this one tests.
os.environ["DYNAXLA_CACHE"] = ""
skip_guard_profile()

# The same examples in every run; `make explore` takes the other profile, and a seed.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None, print_blob=False, suppress_health_check=list(HealthCheck)
)
settings.register_profile("explore", settings.get_profile("repeatable"), derandomize=False)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
