"""Tests of the reuse of freed memory by a program's next call, and of the user's own settings of the heap."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from dynaxla.config import Options
from dynaxla.errors import OptionError
from dynaxla.runtime import heap
from support import internals

# Each case has its own fork of a process that has only imported modules.
PROGRAM = """
import jax, json, os, resource, sys, torch
torch.set_num_threads(1)
cases = {"a program's": lambda x: x.neg() + 1, "torch's kernel's": lambda x: x + 1}
found = {}
for name, function in cases.items():
    for setting in json.loads(sys.argv[1]).get(name, []):
        reading, writing = os.pipe()
        child = os.fork()
        if child:
            os.close(writing)
            found[f"{name} {setting}"] = int(os.read(reading, 100))
            assert os.waitpid(child, 0)[1] == 0
            continue
        os.environ["DYNAXLA_HEAP"] = setting
        compiled = torch.compile(function, backend="dynaxla")
        x = torch.randn(1024, 10240)  # 40 MB, more than glibc keeps by itself
        for _ in range(20):  # an aligned block that was freed does not always hold the next one of its size, but one of several soon does
            compiled(x)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            compiled(x)
        os.write(writing, b"%d" % ((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize()))
        os._exit(0)
print(json.dumps(found))
"""


@pytest.mark.sample(usual=1)
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's heap")
@pytest.mark.parametrize(
    ("variables", "settings"),
    [
        ({}, {"a program's": ["keep", "leave"], "torch's kernel's": ["keep", "leave"]}),
        ({"MALLOC_MMAP_THRESHOLD_": "1000000"}, {"a program's": ["keep"]}),
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000000"}, {"a program's": ["keep"]}),
    ],
    ids=["default", "the user's variable", "the user's tunables"],
)
def test_freed_memory_is_reused(variables: dict[str, str], settings: dict[str, list[str]]) -> None:
    """Memory is not reused if DYNAXLA_HEAP is "leave", or if the user has settings of the heap."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES", "DYNAXLA_HEAP"))
    } | variables
    command = [sys.executable, "-c", PROGRAM, json.dumps(settings)]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    new_bytes = json.loads(process.stdout)
    assert new_bytes.keys() == {f"{name} {setting}" for name, settings_of_case in settings.items() for setting in settings_of_case}
    for name, bytes_of_case in new_bytes.items():
        assert (bytes_of_case > 15 * 40_000_000) == (bool(variables) or name.endswith("leave")), (
            f"{name}: {bytes_of_case} bytes of new pages in 20 calls"
        )


# The calls of the C library. In glibc's malloc.h, M_MXFAST is 1, M_TRIM_THRESHOLD -1, M_MMAP_THRESHOLD -3.
ALL_CALLS = [("mallopt", 1, 0), ("mallopt", -1, 2**31 - 1), ("mallopt", -3, 2**31 - 1), ("malloc_trim", 0)]


@pytest.mark.parametrize(
    ("variables", "calls"),
    [
        ({}, ALL_CALLS),
        ({"MALLOC_TRIM_THRESHOLD_": "131072"}, []),
        ({"MALLOC_TOP_PAD_": "0"}, []),
        ({"MALLOC_ARENA_MAX": "2"}, []),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=2:glibc.malloc.tcache_count=0"}, []),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=2"}, ALL_CALLS),
    ],
    ids=str,
)
def test_users_variables_take_precedence(variables: dict[str, str], calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    actual_calls: list[Any] = []
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    internals.libc(monkeypatch, lambda name: lambda *values: actual_calls.append((name, *values)))
    heap.keep_freed_memory.__wrapped__()
    heap.return_freed_memory()
    assert actual_calls == calls


def test_variable_dynaxla_heap(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Options().heap == "keep"
    monkeypatch.setenv("DYNAXLA_HEAP", "leave")
    assert Options().heap == "leave"
    monkeypatch.setenv("DYNAXLA_HEAP", "yes")
    with pytest.raises(OptionError, match=r"DYNAXLA_HEAP='yes'(.|\n)*'keep' or 'leave'"):
        Options()
