"""A script run as Python runs it, and what is told of it."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest

from dynaxla.explained import explain_script
from dynaxla.observe import engine_decisions
from support.processes.fork_server import found_here
from support.processes.scripts import completed

SCRIPT = """
import sys, threading
import beside
assert sys.path[0] == {folder!r}, sys.path
assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals() and __file__ == {file!r}
print("arguments", sys.argv)
{end}
"""


Done = subprocess.CompletedProcess[str]


def run_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, *arguments: str) -> tuple[Done, Done]:
    """A script run by `dynaxla explain`, and by Python."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").touch()
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(folder=str(tmp_path.resolve()), file=str(file), end=end))
    mine = completed("from dynaxla.cli import main; main()", ["explain", "script.py", *arguments])
    command = [sys.executable, "script.py", *arguments]
    pythons = subprocess.run(command, env=found_here(), capture_output=True, text=True, check=False)
    assert "What to do next" in mine.stdout, mine.stderr
    assert (tmp_path / "explain.html").read_text().startswith("<!DOCTYPE html>")
    return mine, pythons


def test_a_script_gets_its_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, pythons = run_script(tmp_path, monkeypatch, "sys.exit(7)", "--flag", "1", "--platform", "--help", "--", "-x")
    assert pythons.returncode == 7, pythons.stderr
    assert mine.returncode == 7
    assert mine.stdout.splitlines()[0] == pythons.stdout.splitlines()[0]
    assert "'--help', '--', '-x'" in mine.stdout


def test_a_failing_script_looks_as_in_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, pythons = run_script(tmp_path, monkeypatch, "raise ValueError('its own')")
    assert (mine.returncode, mine.stderr) == (pythons.returncode, pythons.stderr)
    assert "its own" in mine.stderr


def test_a_script_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    rude = "import sys\nsys.path.clear()\nsys.argv = []\nsys.exit('told')"
    for source, code in {rude: "told", "": 0, "raise SystemExit": None, "raise KeyboardInterrupt": 130}.items():
        script.write_text(source)
        before = list(sys.argv), list(sys.path), sys.modules["__main__"]
        assert explain_script.run_script(script, ["-x"]) == code
        assert (list(sys.argv), list(sys.path), sys.modules["__main__"]) == before


def test_a_safe_path_has_no_folder_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.exit(sys.path[0])")
    assert explain_script.run_script(script, []) == str(tmp_path.resolve())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "flags", types.SimpleNamespace(safe_path=True))
        assert explain_script.run_script(script, []) == sys.path[0]


def test_a_script_is_read_in_its_encoding(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_bytes("# coding: latin-1\nassert 'ä' == chr(0xE4)\n".encode("latin-1"))
    assert explain_script.run_script(script, []) == 0


TWO = """
import sys
import torch
import dynaxla

def first(x):
    return (x @ x).relu()

compiled = torch.compile(first, backend="dynaxla", options={"cache": "%s"})
for _ in range(5):
    compiled(torch.ones(300, 300))
weight = torch.ones(3, requires_grad=True)

@dynaxla.compile_step(fullgraph=True)
def second():
    (weight * 2).sum().backward()

second()
dynaxla.explain(first, torch.ones(2, 2))
raise RuntimeError("after all")
"""


def test_all_that_a_script_compiles_is_told_also_if_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "two.py"
    script.write_text(TWO % (tmp_path / "cache"))
    found, code = explain_script.explain_script(script, [])
    assert code == 1
    assert "after all" in capsys.readouterr().err
    assert found.error == "it exits with 1"
    assert [captured.is_step for captured in found.captured] == [False, True, False]
    (program,) = found.captured[0].graphs[0].programs
    assert program.runs == 5
    assert found.costs[0].line.source == "return (x @ x).relu()"
    assert found.is_script
    assert "XLA's programs in all" in str(found)


COMPETING = """
import torch

def first(x):
    return (x @ x).relu()

compiled = torch.compile(first, backend="dynaxla_auto", options={"engines": ["dynaxla", "eager"]})
with torch.no_grad():
    for _ in range(%d):
        compiled(torch.ones(10, 10))
"""


def test_which_engine_was_taken_is_told(tmp_path: Path) -> None:
    engine_decisions.reset()
    script = tmp_path / "competing.py"
    told = []
    for calls in (1, 500):
        script.write_text(COMPETING % calls)
        found, code = explain_script.explain_script(script, [])
        assert code == 0
        told.append(found.captured[0].graphs[0])
    assert told[0].engine == "not decided yet"
    verdict = engine_decisions.verdicts()[-1]
    assert told[1].engine == verdict["chosen"]
    assert told[1].engine_note.startswith(verdict["why"])
    engine_decisions.reset()
