"""XLA's pool follows torch's number of threads, and leaves the user's environment and JAX alone."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from jax._src import xla_bridge

from dynaxla.runtime import transfer


def test_each_number_of_threads_has_a_client() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = transfer.cpu_device()
        torch.set_num_threads(2)
        assert transfer.cpu_device() is not one
        torch.set_num_threads(1)
        assert transfer.cpu_device() is one
    finally:
        torch.set_num_threads(before)
    assert "PJRT_NPROC" not in os.environ


def test_result_is_the_same_on_any_number_of_threads() -> None:
    x = torch.randn(256, 256)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch._dynamo.reset()
            compiled = torch.compile(lambda x: (x @ x).relu(), backend="dynaxla")
            torch.testing.assert_close(compiled(x), (x @ x).relu(), rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(xla_bridge, "_backends"), reason="this JAX keeps its clients elsewhere")
def test_jax_is_not_started() -> None:
    script = """
import torch
from jax._src import xla_bridge
torch.compile(lambda x: torch.nn.functional.dropout(x * 2) @ x, backend="dynaxla")(torch.ones(3, 3))
assert not xla_bridge._backends, xla_bridge._backends
"""
    subprocess.run([sys.executable, "-c", script], check=True)
