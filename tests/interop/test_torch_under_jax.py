"""Torch's functions inside JAX's transforms, on the device "jax"."""

from __future__ import annotations

import quick
from newer import not_in_oldest
from scripts import run_script

pytestmark = not_in_oldest("storages that can be made without memory")


def test_torch_under_jax() -> None:
    run_script("import device_cases; device_cases.run('under_jax')", XLA_FLAGS=quick.flags())
