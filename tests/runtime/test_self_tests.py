"""Tests of the self-tests of oneDNN's calls, in a child process with stored results, and of private entry points, in this process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dynaxla.lowering.cpu import onednn, onednn_support
from dynaxla.runtime import clients, private, private_self_tests, programs, self_tests
from dynaxla.runtime.store import Store
from support.processes.scripts import run_script
from support.timing import quick_compilation

SUBJECTS = ("one", "two")


def script(tmp_path: Path, body: str) -> Path:
    """Writes a self-test that records its runs in a file."""
    path = tmp_path / "script.py"
    path.write_text(f"import os, sys\nopen({str(tmp_path / 'runs')!r}, 'a').write('x')\nprint('started', flush=True)\n{body}")
    return path


def runs(tmp_path: Path) -> int:
    path = tmp_path / "runs"
    return len(path.read_text()) if path.exists() else 0


def test_results_are_stored_by_facts_and_script(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    path = script(tmp_path, "print('one passed', flush=True)\nprint('two matmul', flush=True)")
    for _ in range(2):
        assert self_tests.results(path, SUBJECTS, ["1.0"], store) == {"one": "", "two": "matmul"}
    assert runs(tmp_path) == 1
    self_tests.results(path, SUBJECTS, ["1.1"], store)
    assert runs(tmp_path) == 2, "another version"
    path.write_text(path.read_text() + "\n")
    self_tests.results(path, SUBJECTS, ["1.1"], store)
    assert runs(tmp_path) == 3, "another script"


def test_results_of_a_crashed_process_are_stored(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    path = script(tmp_path, "print('one passed', flush=True)\nos.abort()")
    results = self_tests.results(path, SUBJECTS, [], store)
    assert results == {"one": "", "two": "the self-test's process ended"}
    assert self_tests.results(path, SUBJECTS, [], store) == results
    assert runs(tmp_path) == 1, "the self-test must not run again"


def test_results_are_none_if_the_self_test_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "store")
    path = script(tmp_path, "print('one passed', flush=True)")
    assert self_tests.results(path, SUBJECTS, [], None) is None, "without a store, each process would run the self-test"
    assert self_tests.results(tmp_path / "gone.py", SUBJECTS, [], store) is None
    monkeypatch.setattr(sys, "executable", str(tmp_path / "server"))
    assert self_tests.results(path, SUBJECTS, [], store) is None, "an interpreter embedded in another program"
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python-that-is-gone"))
    assert self_tests.results(path, SUBJECTS, [], store) is None
    monkeypatch.undo()
    path.write_text("raise SystemExit(3)")
    assert self_tests.results(path, SUBJECTS, [], store) is None, "a self-test that fails before it starts"
    assert not list(store), "nothing must be stored"


def test_known_versions_are_assumed_to_work_without_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn_support, "_self_test", lambda: None)
    assert onednn_support._refused("float32") == ""
    monkeypatch.setattr(private, "jaxlib_version", lambda: "0.99.0")
    assert "0.99.0" in onednn_support._refused("float32")
    monkeypatch.setattr(onednn_support, "_self_test", lambda: {"float32": "", "bfloat16": "matmul True True"})
    assert onednn_support._refused("float32") == ""
    assert onednn_support._refused("bfloat16") == "the self-test fails: matmul True True"


@pytest.mark.skipif(not onednn_support.is_available(), reason="this XLA:CPU has no oneDNN")
def test_self_test_of_onednn_detects_a_wrong_activation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = self_tests.results(Path(onednn.__file__), ["float32"], [], Store(tmp_path))
    assert results == {"float32": ""}
    monkeypatch.setitem(onednn.ACTIVATIONS, "tanh", "SIGMOID")
    assert onednn.self_test(np.dtype(np.float32)) == "matmul with tanh"


def test_fingerprints_differ_without_the_pass_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_gated", {})
    monkeypatch.setattr(private.Fast, "pass_manager", object())
    first, second = (jax.jit(lambda x, n=n: x + n).lower(np.float32(0)) for n in (1, 2))
    assert programs.fingerprint(first) != programs.fingerprint(second)
    assert "gated: AttributeError" in private.fast_paths()["programs as bytes (jax.extend.mlir.passmanager.PassManager)"]


NAMES = [name for names in private_self_tests._TESTS for name in names]


@pytest.mark.parametrize("name", NAMES)
def test_changed_entry_point_is_not_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(*_: Any, **__: Any) -> Any:
        raise TypeError("it takes other arguments now")

    for entry_point in private.Fast.__annotations__:
        monkeypatch.setattr(private.Fast, entry_point, getattr(private.Fast, entry_point))
    monkeypatch.setattr(private, "_gated", {})
    monkeypatch.setattr(private_self_tests, "_has_run", False)
    device = clients.cpu_device()
    monkeypatch.setattr(private_self_tests, "_has_run", False)
    monkeypatch.setattr(private.Fast, name, changed)
    private_self_tests.run(device)
    assert getattr(private.Fast, name) is None
    states = set(private.fast_paths().values())
    assert states == {"live", "gated: TypeError: it takes other arguments now"}


@pytest.mark.parametrize(
    ("changed", "gated"),
    [
        (sorted(set(private.Fast.__annotations__) - {"make_cpu_client", "runtime_executable"}), 8),
        (["result_handler"], 1),
    ],
    ids=["all", "of results"],
)
def test_results_with_changed_entry_points(changed: list[str], gated: int) -> None:
    """In a separate process, in which calls of these entry points raise."""
    program = (
        f"""
NAMES = {changed}
"""
        + """
import torch
import dynaxla
from dynaxla.runtime import private

def changed(*_, **__):
    raise TypeError("it takes other arguments now")

for name in NAMES:
    setattr(private.Fast, name, changed)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
compiled = torch.compile(net, backend="dynaxla")
for rows in (3, 3, 5):
    x = torch.randn(rows, 4)
    gradients = []
    for module in (net, compiled):
        module.zero_grad()
        module(x).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in net.parameters()])
    torch.testing.assert_close(*gradients)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), net(x))
print(sorted(state for state in private.fast_paths().values() if state != "live"))
"""
    )
    output = run_script(program, XLA_FLAGS=quick_compilation.flags())
    assert output.count("gated: TypeError: it takes other arguments now") == gated, output
    assert ("gated: the public function imports torch's memory" in output) == ("to_buffer" in changed)
