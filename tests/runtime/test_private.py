"""Tests of private entry points: each exists, has a public fallback, or raises an error that names the missing one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dynaxla
from dynaxla.runtime import private
from support.processes.scripts import run_script


def test_all_private_entry_points_exist() -> None:
    assert not private.missing
    assert all(getattr(private.Fast, name) is not None for name in private.Fast.__annotations__)


def test_missing_entry_point_without_fallback_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "missing", [])
    gone = private._require("torch._C._gone")
    assert private.missing == ["torch._C._gone"]
    assert private._find("torch._C._gone") is private._find("no_such_module.at_all") is None
    with pytest.raises(dynaxla.errors.UnsupportedVersion, match=r"no torch\._C\._gone(.|\n)*torch 2\.11 to 2\.15 and jax 0\.10 to 0\.12"):
        gone()


def test_attributes_that_other_versions_lack_are_named_or_have_a_default(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert private.is_profiling(), "without the attribute, profiling is assumed"


def test_cpu_client_is_synchronous(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: list[Any] = []
    monkeypatch.setattr(private, "_gated", {})
    monkeypatch.setattr(private.Fast, "make_cpu_client", lambda **keywords: arguments.append(keywords))
    private.make_cpu_client()
    assert arguments == [{"asynchronous": False}]
    monkeypatch.setattr(private.Fast, "make_cpu_client", lambda: "a client of other arguments")
    assert private.make_cpu_client() is None
    assert private.Fast.make_cpu_client is None


def test_public_fallbacks_without_any_private_entry_point() -> None:
    """In a process in which no private name is found: public fallbacks work, and other uses name the missing entry point."""
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
