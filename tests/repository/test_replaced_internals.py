"""Checks that only a few test files replace internals of dynaxla. Each has a reason here: behaviour that tests cannot reach otherwise."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from support.paths import TESTS

REPLACED = {
    "support/internals.py": "the list of replaced internals, for all tests that need one",
    # Planted faults.
    "cases/faults/ops.py": "faults",
    "cases/faults/padding.py": "faults",
    "cases/faults/guards.py": "faults",
    "cases/faults/steps.py": "faults",
    "cases/faults/engines.py": "faults",
    # Replacements for devices that the machine does not have.
    "support/fakes/simulated_gpu.py": "the order of work on a GPU, without one",
    "support/fakes/simulated_cudnn.py": "values of cuDNN's attention, without a GPU",
    "commands/gpu_programs/programs.py": "programs for a GPU, without one: they are compiled and not run",
    "cases/device/mesh_attention.py": "an attention that is small, and computed as a large one",
    "cases/device/virtual_meshes.py": "a topology of CPU devices, without libtpu",
    "cases/device/simulated_tpu.py": "programs, late checks and donation of a TPU, without one",
    # Rare events and races that a test must cause.
    "support/timing/paused_compilation.py": "calls while a compilation runs in the background",
    "cases/device/aliases.py": "losses and races of writes to aliases",
    "cases/device/compiled.py": "a write by another thread between two steps of a call",
    "cases/device/recordings.py": "a write by another thread while ops are recorded",
    # Other settings for all graphs of a test.
    "support/timing/quick_compilation.py": "XLA's options for all graphs of a test",
    "support/comparisons/rounded_sizes.py": "padding that spoils each result that depends on it",
    "cases/random_programs/rounded.py": "rounded sizes for graphs that would not be worth it",
    "cases/layout_sweep/trial.py": "the strides of results, without a compilation",
    "support/fakes/tiny_benchmark.py": "a benchmark that takes no minutes",
    # Tests of private code: entry points of other libraries, the machine, times.
    "runtime/test_private.py": "releases without an entry point",
    "runtime/test_self_tests.py": "self-tests of entry points that fail",
    "runtime/test_machine.py": "other processors and systems",
    "runtime/test_process_networks.py": "a connection that fails",
    "test_doctor.py": "broken environments",
    "observe/test_progress.py": "seconds after which a line is shown",
    "tuning/test_tuner.py": "measured times, and another version of dynaxla",
}
# Calls of pytest's monkeypatch and of unittest.mock.patch that replace an attribute or an item.
_CALLS = {"setattr", "setitem", "delattr", "object", "multiple", "dict"}


def _is_replaced(source: str) -> bool:
    """True if a module replaces an attribute of a module or class of dynaxla."""
    tree = ast.parse(source)
    own = {alias.asname or alias.name.split(".")[0] for node in ast.walk(tree) for alias in _imported(node)}
    return any(
        _name_of(node.args[0]) in own for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args and _is_patch(node.func)
    )


def _imported(node: ast.AST) -> Iterator[ast.alias]:
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dynaxla":
        yield from node.names
    elif isinstance(node, ast.Import):
        yield from (alias for alias in node.names if alias.name.split(".")[0] == "dynaxla")


def _is_patch(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr in _CALLS and "patch" in ast.unparse(function.value)


def _name_of(target: ast.expr) -> str:
    """Returns the leftmost name of attributes, items and calls; for a string, its first part."""
    while not isinstance(target, (ast.Name, ast.Constant)):
        children = list(ast.iter_child_nodes(target))
        if not isinstance(target, (ast.Attribute, ast.Subscript, ast.Call)):
            return ""
        target = children[0]  # type: ignore[assignment]
    return target.id if isinstance(target, ast.Name) else str(target.value).split(".")[0]


def test_all_files_that_replace_internals_are_listed() -> None:
    files = {path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py") if _is_replaced(path.read_text())}
    assert files == set(REPLACED)
    assert len(REPLACED) <= 30


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from dynaxla.runtime import heap\nmonkeypatch.setattr(heap, 'LARGE_BYTES', 1)", True),
        ("from dynaxla.runtime import heap\nmonkeypatch.setattr(heap.of(x).table[0], 'LARGE_BYTES', 1)", True),
        ("import dynaxla\nwith mock.patch.object(dynaxla.backend, 'engine_for'):\n    pass", True),
        ("import dynaxla\nmonkeypatch.setattr('dynaxla.backend.engine_for', None)", True),
        ("import os, dynaxla\nmonkeypatch.setattr(os, 'replace', None)", False),
        ("from dynaxla import config\nmonkeypatch.setenv('DYNAXLA_CACHE', '')", False),
    ],
)
def test_is_replaced(source: str, expected: bool) -> None:
    assert _is_replaced(source) == expected
