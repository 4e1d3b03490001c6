"""Memory that a program has freed is used again by its next call, and the user's own settings of the heap stay."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
torch.set_num_threads(1)
compiled = torch.compile(lambda x: x + 1, backend="dynaxla")
x = torch.randn(1024, 16384)  # 64 MB, more than glibc keeps by itself
for _ in range(20):  # an aligned block that was freed does not always hold the next one of its size, but one of several soon does
    compiled(x)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    compiled(x)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's heap")
@pytest.mark.parametrize(
    "setting",
    [{}, {"MALLOC_MMAP_THRESHOLD_": "1000000"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000000"}],
    ids=["dynaxla's", "the user's", "the user's tunables"],
)
def test_memory_is_used_again(setting: dict[str, str]) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))} | setting
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 15 * 60_000_000) == bool(setting), f"{done.stdout} bytes of new pages in 20 calls"
