"""Private entry points: each is there, has a public way beside it, or says what is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynaxla
from dynaxla.runtime import private
from support.processes.scripts import run_script


def test_all_are_there() -> None:
    assert not private.missing
    assert all(getattr(private.Fast, name) is not None for name in private.Fast.__annotations__)


def test_one_without_another_way_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "missing", [])
    gone = private._require("torch._C._gone")
    assert private.missing == ["torch._C._gone"]
    assert private._find("torch._C._gone") is private._find("no_such_module.at_all") is None
    with pytest.raises(dynaxla.errors.UnsupportedVersion, match=r"no torch\._C\._gone(.|\n)*torch 2\.11 to 2\.15 and jax 0\.10 to 0\.12"):
        gone()


def test_what_other_versions_lack_is_named_or_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing: Any = object()
    with pytest.raises(dynaxla.errors.UnsupportedVersion, match=r"have no jax.*host_callbacks"):
        private.host_callbacks(nothing)
    monkeypatch.delattr(torch.compiler, "_is_compiling_flag")
    with pytest.raises(dynaxla.errors.UnsupportedVersion, match=r"have no torch\.compiler\._is_compiling_flag"):
        private.compiling_flag()
    for value in (False, True):
        monkeypatch.setattr(torch.autograd.profiler, "_is_profiler_enabled", value)
        assert private.is_profiling() == value
    monkeypatch.delattr(torch.autograd.profiler, "_is_profiler_enabled")
    assert private.is_profiling(), "for all that is known"


def test_a_client_runs_programs_in_the_thread_that_calls_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(private, "_gated", {})
    monkeypatch.setattr(private.Fast, "make_cpu_client", lambda **given: asked.append(given))
    private.make_cpu_client()
    assert asked == [{"asynchronous": False}]
    monkeypatch.setattr(private.Fast, "make_cpu_client", lambda: "a client of other arguments")
    assert private.make_cpu_client() is None
    assert private.Fast.make_cpu_client is None


def test_other_versions_have_public_ways() -> None:
    """In a process whose torch and jaxlib lack all that is found by name: what has a public way works, the rest says what is missing."""
    script = """
import pkgutil
found = pkgutil.resolve_name
def resolve_name(name):
    if name.startswith(("torch._C.", "jaxlib.", "jax._src.")):
        raise AttributeError(name)
    return found(name)
pkgutil.resolve_name = resolve_name
import torch
from dynaxla.errors import UnsupportedVersion
from dynaxla.runtime import clients, private, transfer
pkgutil.resolve_name = found
assert [name for name, state in private.fast_paths().items() if state == "live"] == [
    "execute without checks (jax.stages.Compiled.runtime_executable)", "programs as bytes (jax.extend.mlir.passmanager.PassManager)"
]  # in public modules
assert not clients.is_own(clients.cpu_device())
x = torch.ones(3)
assert private.storage_id(x) == private.storage_id(x[1:]) != private.storage_id(x.clone())
assert transfer.export_array(transfer.import_tensor(x.clone(), clients.cpu_device())).tolist() == [1, 1, 1]
with torch.utils._python_dispatch._disable_current_modes():
    assert private.mode_count() == 0
try:
    with private.below_autograd():
        pass
except UnsupportedVersion as error:
    print(error.message)
"""
    assert "_AutoDispatchBelowAutograd, which dynaxla needs" in run_script(script, own=True)
