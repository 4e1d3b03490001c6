"""torch's functions inside JAX's transforms, on the device "jax"."""

from __future__ import annotations

from support.processes.scripts import run_script
from support.releases import not_in_oldest
from support.timing import quick_compilation

pytestmark = not_in_oldest("storages that can be made without memory")


def test_torch_under_jax() -> None:
    run_script("from cases import device; device.run('under_jax')", XLA_FLAGS=quick_compilation.flags())
