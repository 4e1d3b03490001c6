"""Memory that a program has freed is used again by its next call, and the user's own settings of the heap stay."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from dynaxla import OptionError
from dynaxla.config import Options
from dynaxla.runtime import heap

PROGRAM = """
import resource, torch
torch.set_num_threads(1)
compiled = torch.compile(lambda x: {formula}, backend="dynaxla")
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
    ("formula", "setting"),
    [
        ("x.neg() + 1", {}),
        ("x + 1", {}),
        ("x.neg() + 1", {"MALLOC_MMAP_THRESHOLD_": "1000000"}),
        ("x.neg() + 1", {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000000"}),
        ("x.neg() + 1", {"DYNAXLA_HEAP": "leave"}),
        ("x + 1", {"DYNAXLA_HEAP": "leave"}),
    ],
    ids=["a program's", "torch's kernel's", "the user's", "the user's tunables", "left alone", "left alone, torch's kernel's"],
)
def test_memory_is_used_again(formula: str, setting: dict[str, str]) -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES", "DYNAXLA_HEAP"))
    } | setting
    command = [sys.executable, "-c", PROGRAM.format(formula=formula)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert (int(done.stdout) > 15 * 60_000_000) == bool(setting), f"{done.stdout} bytes of new pages in 20 calls"


# As in glibc's malloc.h: M_MXFAST is 1, M_TRIM_THRESHOLD -1, M_MMAP_THRESHOLD -3.
ALL = [("mallopt", 1, 0), ("mallopt", -1, 2**31 - 1), ("mallopt", -3, 2**31 - 1), ("malloc_trim", 0)]


@pytest.mark.parametrize(
    ("variables", "calls"),
    [
        ({}, ALL),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, []),
        ({"MALLOC_TOP_PAD_": "0"}, []),
        ({"MALLOC_ARENA_MAX": "2"}, []),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=2:glibc.malloc.tcache_count=0"}, []),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=2"}, ALL),
    ],
    ids=str,
)
def test_variables_of_the_users_win(variables: dict[str, str], calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(heap, "_function", lambda name: lambda *values: made.append((name, *values)))
    heap.keep_freed_memory.__wrapped__()
    heap.return_freed_memory()
    assert made == calls


def test_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options().heap == "keep"
    assert Options.parse({"heap": "leave"}, None).heap == "leave"
    monkeypatch.setenv("DYNAXLA_HEAP", "leave")
    assert Options().heap == "leave"
    monkeypatch.setenv("DYNAXLA_HEAP", "yes")
    with pytest.raises(OptionError, match="keep"):
        Options()
    with pytest.raises(OptionError, match="heap=True"):
        Options.parse({"heap": True}, None)
