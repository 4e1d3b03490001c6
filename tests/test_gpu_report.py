"""`make gpu` says what is missing, runs what it has, and stops what takes too long. Its stages are tried here with commands for no GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from gpu_report import __main__ as command
from gpu_report import environment
from gpu_report.stages import Stage, run_all, stages

LONG = 100.0


def test_what_is_missing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("jax", "pytest") else find(name))
    assert command.main([]) == 2
    printed = capfd.readouterr().out
    assert "jax is missing, which dynaxla needs: pip install jax\n" in printed
    assert "pytest is missing, which its tests need: pip install pytest\n" in printed
    assert printed.count("missing:") == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_doctor_says_so() -> None:
    """As `make gpu` runs it: by a path of its own, in a directory of its own."""
    line = [sys.executable, "-m", "gpu_report", "--minutes", "3"]
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(str(environment.PROJECT / name) for name in ("src", "tests"))}
    done = subprocess.run(line, env=found, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "torch and a GPU" in done.stdout
    assert "jax sees cuda" in done.stdout
    assert "Not gone further" in done.stdout
    assert "pytest" not in done.stdout


def test_the_name_is_found_without_an_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    installed = importlib.metadata.entry_points(group="torch_dynamo_backends")
    expected = {(point.name, point.value) for point in installed if point.name.startswith("dynaxla")}
    monkeypatch.setattr(importlib.metadata, "version", version)
    variables = environment.variables(tmp_path, {"PYTHONPATH": "/elsewhere", "DYNAXLA_CACHE": "/earlier", "HOME": "/root"})
    *path, metadata, before = variables["PYTHONPATH"].split(os.pathsep)
    assert (path, metadata, before) == ([str(environment.PROJECT / "src"), str(environment.PROJECT / "tests")], str(tmp_path), "/elsewhere")
    assert variables["DYNAXLA_CACHE"] == ""
    assert variables["HOME"] == "/root"
    (found,) = importlib.metadata.distributions(path=[metadata])
    points = found.entry_points.select(group="torch_dynamo_backends")
    assert {(point.name, point.value) for point in points} == expected


def test_where_it_is_installed_nothing_is_written(tmp_path: Path) -> None:
    assert str(tmp_path) not in environment.variables(tmp_path, {})["PYTHONPATH"]
    assert list(tmp_path.iterdir()) == []


def python(code: str, **settings: float) -> Stage:
    return Stage(code, ["-c", code], **settings)


def test_stages(capfd: pytest.CaptureFixture[str]) -> None:
    """One that fails ends none of the others; all that they print is in one text, in order."""
    wanted = [python("print('one')"), python("raise SystemExit(3)"), python("import sys; print('two', file=sys.stderr)")]
    assert run_all(wanted, os.environ, time.monotonic() + LONG) == ["raise SystemExit(3)"]
    printed = capfd.readouterr().out
    places = [printed.index(text) for text in ("\none\n", "== exit code 3", "\ntwo\n")]
    assert places == sorted(places)
    assert printed.count("== well") == 2


def test_what_takes_too_long_is_stopped_with_its_children(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "child"
    child = "import os, signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(100)"
    start = f"import subprocess, sys; process = subprocess.Popen([sys.executable, '-c', {child!r}])"
    parent = f"{start}; open({str(file)!r}, 'w').write(str(process.pid)); process.wait()"
    begun = time.monotonic()
    assert run_all([python(parent, limit=2.0)], os.environ, begun + LONG) == [parent]
    assert time.monotonic() - begun < 20
    assert "stopped: its 2 s were over" in capfd.readouterr().out
    assert _is_gone(int(file.read_text()))


def _is_gone(process: int) -> bool:
    """Within a second: its parent is gone, and init may not have asked for it yet."""
    for _ in range(100):
        state = Path(f"/proc/{process}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.01)
    return False


def test_a_stage_leaves_the_others_their_time() -> None:
    begun = time.monotonic()
    assert run_all([python("import time; time.sleep(100)", reserve=LONG - 1)], os.environ, begun + LONG)
    assert time.monotonic() - begun < 20


def test_every_file_of_tests_is_a_stage(tmp_path: Path) -> None:
    found = stages(environment.PROJECT / "tests" / "gpu", tmp_path)
    names = {file.name for file in (environment.PROJECT / "tests" / "gpu").glob("test_*.py")}
    assert {stage.title for stage in found if stage.command[1] == "pytest"} == {f"pytest {name}" for name in names}
    assert [stage.title for stage in found if "bench-gpu" in stage.command] == [stage.title for stage in found[len(names) :]]


def test_pytest_runs_without_its_timeouts_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_it():\n    pass\n")
    (with_plugin, *_) = stages(tmp_path, tmp_path)
    monkeypatch.setattr(environment, "has", lambda module: False)
    (without, *_) = stages(tmp_path, tmp_path)
    assert set(with_plugin.line) < set(without.line)
    line = [*without.line, "-c", str(environment.PROJECT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:timeout"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
