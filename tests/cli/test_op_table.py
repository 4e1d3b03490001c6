"""Which way each op goes, and a script run as Python runs it."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from dynaxla.cli import op_table
from dynaxla.cli.op_table import ways
from dynaxla.observe import coverage


def test_ops_lists_every_core_op() -> None:
    kinds = {str(way.op): way.kind for way in ways("cpu") if torch.Tag.core in way.op.tags}
    assert len(kinds) > 150
    # Those whose result's size or number depends on a tensor's values: no XLA program can hold them.
    assert {op for op, kind in kinds.items() if kind == "kernel"} == {"aten.nonzero.default", "aten._local_scalar_dense.default"}


SCRIPT = """
import sys, threading
import beside
assert sys.path[0] == {folder!r}, sys.path
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals() and __file__ == {file!r}
print("arguments", sys.argv)
{end}
"""


def run_script(tmp_path: Path, end: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """A script run by `dynaxla ops --run`, and by Python."""
    (tmp_path / "beside.py").touch()
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(folder=str(tmp_path.resolve()), file=str(file), end=end))
    ops = [sys.executable, "-c", "from dynaxla.cli import main; main()", "ops", "--run", "script.py", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    mine, pythons = (
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        for command in (ops, [sys.executable, "script.py", *arguments])
    )
    assert "nodes lowered" in mine.stdout, mine.stderr
    return mine, pythons


def test_a_script_gets_its_flags(tmp_path: Path) -> None:
    mine, pythons = run_script(tmp_path, "sys.exit(7)", "--flag", "1", "--platform", "--help", "--", "-x")
    assert pythons.returncode == 7, pythons.stderr
    assert mine.returncode == 7
    assert mine.stdout.splitlines()[0] == pythons.stdout.splitlines()[0]
    assert "'--help', '--', '-x'" in mine.stdout


def test_a_failing_script_looks_as_in_python(tmp_path: Path) -> None:
    mine, pythons = run_script(tmp_path, "raise ValueError('its own')")
    assert (mine.returncode, mine.stderr) == (pythons.returncode, pythons.stderr)
    assert "its own" in mine.stderr


def test_ways_are_those_of_the_platform() -> None:
    kinds = {str(way.op): way for way in ways("cpu")}
    assert kinds["aten.cumsum.default"].kind == "lowering"
    assert kinds["aten.cumsum.default"].where.startswith("scans:")
    assert kinds["aten.addcmul.default"].kind == kinds["aten.hardshrink.default"].kind == "lowering"
    assert kinds["aten.linalg_norm.default"].kind == "decomposition"
    assert kinds["aten.nonzero.default"].kind == "kernel"
    assert "aten.add_.Tensor" not in kinds, "no functional graph holds it"
    assert "aten.add.out" not in kinds
    assert "aten.can_cast.default" not in kinds, "it is not about tensors"


def test_the_totals_tell_the_core_set_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    aten = torch.ops.aten
    found = [
        op_table.Way(op, kind)
        for op, kind in ((aten.add.Tensor, "lowering"), (aten.cholesky_inverse.default, "lowering"), (aten.nonzero.default, "kernel"))
    ]
    monkeypatch.setattr(op_table, "ways", lambda _: found)
    assert [list(column.cells) for column in op_table.totals_table("cpu").columns] == [
        ["lowering", "decomposition", "kernel", "together"],
        ["2", "0", "1", "3"],
        ["1", "0", "1", "2"],
    ]


def test_the_observed_table_has_fallbacks_first_and_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {"abs": (1, 0), "cos": (5, 0), "sin": (0, 1)}
    found = {f"aten.{name}.default": {"lowered": lowered, "fallback": fallback} for name, (lowered, fallback) in counts.items()}
    monkeypatch.setattr(coverage, "snapshot", lambda: found)
    assert [list(column.cells) for column in op_table.observed_table().columns] == [
        ["aten.sin.default", "aten.cos.default", "aten.abs.default", "together"],
        ["0", "5", "1", "6"],
        ["1", "0", "0", "1"],
    ]
    for pattern in ("s*", "sin", "sin.default", "aten.sin.*"):
        assert list(op_table.observed_table([pattern]).columns[0].cells) == ["aten.sin.default", "together"]


def test_a_script_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    rude = "import sys\nsys.path.clear()\nsys.argv = []\nsys.exit('told')"
    for source, code in {rude: "told", "": 0, "raise SystemExit": None, "raise KeyboardInterrupt": 130}.items():
        script.write_text(source)
        before = list(sys.argv), list(sys.path), sys.modules["__main__"]
        assert op_table.run_script(script, ["-x"]) == code
        assert (list(sys.argv), list(sys.path), sys.modules["__main__"]) == before


def test_a_safe_path_has_no_folder_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.exit(sys.path[0])")
    assert op_table.run_script(script, []) == str(tmp_path.resolve())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "flags", types.SimpleNamespace(safe_path=True))
        assert op_table.run_script(script, []) == sys.path[0]


def test_a_script_is_read_in_its_encoding(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_bytes("# coding: latin-1\nassert 'ä' == chr(0xE4)\n".encode("latin-1"))
    assert op_table.run_script(script, []) == 0
