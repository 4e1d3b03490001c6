"""Tests of `dynaxla explain SCRIPT`: the script runs as in Python, and the explanation has all that it compiles."""

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


Process = subprocess.CompletedProcess[str]


def run_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str, *arguments: str) -> tuple[Process, Process]:
    """Runs a script with `dynaxla explain`, and with Python alone. Returns both processes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "beside.py").touch()
    file = tmp_path / "script.py"
    file.write_text(SCRIPT.format(folder=str(tmp_path.resolve()), file=str(file), end=end))
    explained = completed("from dynaxla.cli import main; main()", ["explain", "script.py", *arguments])
    command = [sys.executable, "script.py", *arguments]
    plain = subprocess.run(command, env=found_here(), capture_output=True, text=True, check=False)
    assert "What to do next" in explained.stdout, explained.stderr
    assert (tmp_path / "explain.html").read_text().startswith("<!DOCTYPE html>")
    return explained, plain


def test_script_gets_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explained, plain = run_both_ways(tmp_path, monkeypatch, "sys.exit(7)", "--flag", "1", "--platform", "--help", "--", "-x")
    assert plain.returncode == 7, plain.stderr
    assert explained.returncode == 7
    assert explained.stdout.splitlines()[0] == plain.stdout.splitlines()[0]
    assert "'--help', '--', '-x'" in explained.stdout


def test_failing_script_prints_pythons_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    explained, plain = run_both_ways(tmp_path, monkeypatch, "raise ValueError('its own')")
    assert (explained.returncode, explained.stderr) == (plain.returncode, plain.stderr)
    assert "its own" in explained.stderr


def test_run_script_restores_sys_path_argv_and_main(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    clears_path = "import sys\nsys.path.clear()\nsys.argv = []\nsys.exit('told')"
    for source, code in {clears_path: "told", "": 0, "raise SystemExit": None, "raise KeyboardInterrupt": 130}.items():
        script.write_text(source)
        before = list(sys.argv), list(sys.path), sys.modules["__main__"]
        assert explain_script.run_script(script, ["-x"]) == code
        assert (list(sys.argv), list(sys.path), sys.modules["__main__"]) == before


def test_safe_path_omits_the_scripts_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.exit(sys.path[0])")
    assert explain_script.run_script(script, []) == str(tmp_path.resolve())
    with monkeypatch.context() as patch:
        patch.setattr(sys, "flags", types.SimpleNamespace(safe_path=True))
        assert explain_script.run_script(script, []) == sys.path[0]


def test_script_is_read_in_its_encoding(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_bytes("# coding: latin-1\nassert 'ä' == chr(0xE4)\n".encode("latin-1"))
    assert explain_script.run_script(script, []) == 0


FAILING_SCRIPT = """
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


def test_explanation_of_a_failing_script_has_all_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "two.py"
    script.write_text(FAILING_SCRIPT % (tmp_path / "cache"))
    explanation, code = explain_script.explain_script(script, [])
    assert code == 1
    assert "after all" in capsys.readouterr().err
    assert explanation.error == "it exits with 1"
    assert [captured.is_step for captured in explanation.captured] == [False, True, False]
    (program,) = explanation.captured[0].graphs[0].programs
    assert program.runs == 5
    assert explanation.costs[0].line.source == "return (x @ x).relu()"
    assert explanation.is_script
    assert "XLA's programs in all" in str(explanation)


SCRIPT_WITH_ENGINES = """
import torch

def first(x):
    return (x @ x).relu()

compiled = torch.compile(first, backend="dynaxla_auto", options={"engines": ["dynaxla", "eager"]})
with torch.no_grad():
    for _ in range(%d):
        compiled(torch.ones(10, 10))
"""


def test_explanation_of_a_script_has_the_chosen_engine(tmp_path: Path) -> None:
    engine_decisions.reset()
    script = tmp_path / "competing.py"
    graphs = []
    for calls in (1, 500):
        script.write_text(SCRIPT_WITH_ENGINES % calls)
        explanation, code = explain_script.explain_script(script, [])
        assert code == 0
        graphs.append(explanation.captured[0].graphs[0])
    assert graphs[0].engine == "not decided yet"
    verdict = engine_decisions.verdicts()[-1]
    assert graphs[1].engine == verdict["chosen"]
    assert graphs[1].engine_note.startswith(verdict["why"])
    engine_decisions.reset()
