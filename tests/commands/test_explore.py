"""Tests of `make explore`: it draws new cases in each run, reports failures with the command to repeat them, and survives crashes."""

from __future__ import annotations

import itertools
import os
import re
import signal
from types import SimpleNamespace

import pytest

from commands.explore import __main__ as command
from commands.explore.sources import SOURCES, Source

SECOND = ["--minutes", "0.02"]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances by 0.05 seconds each time it is read."""
    now = itertools.count(0.0, 0.05)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(now)))


def passing(seed: int) -> str:
    return ""


def planted(seed: int) -> str:
    """Fails for the third seed."""
    return f"{seed} is wrong" if seed % 1_000_000 == 2 else ""


def crashing(seed: int) -> str:
    """Crashes for the second seed."""
    if seed % 1_000_000 == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return ""


class LocalExplorer:
    """An explorer that runs cases in this process."""

    def judge(self, source: Source, seed: int) -> str:
        return source(seed)

    def close(self) -> None: ...


@pytest.mark.thorough
def test_failures_and_crashes_are_reported_and_can_be_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    """After a crash, a new process continues."""
    sources = {"passing": passing, "planted": planted, "crashing": crashing}
    assert command.main([*SECOND, "--seed", "7"], sources) == 1
    printed = capsys.readouterr().out
    assert "--seed 7\n" in printed
    assert "7000002 is wrong" in printed
    assert 'crashed, or was silent for too long\nrepeat: make explore ARGS="--only crashing:7000001"' in printed
    *_, last = printed.splitlines()
    assert last.endswith("crashing: 2 failed")
    assert all(int(count) > 2 for count in re.findall(r"(\d+) \w+[,:]", last)), last
    (repeated,) = re.findall(r'repeat: make explore ARGS="(--only planted:\d+)"', printed)
    assert command.main(repeated.split(), sources) == 1
    assert command.main(["--only", "planted:7000003"], sources) == 0


def test_run_without_failures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Explorer", LocalExplorer)
    runs = [(command.main(SECOND, {"passing": passing}), capsys.readouterr().out.splitlines()) for _ in range(2)]
    assert [status for status, _ in runs] == [0, 0]
    assert all(lines[-1].endswith("passing: 0 failed") for _, lines in runs)
    assert runs[0][1][0] != runs[1][1][0], "each run has another seed"


@pytest.mark.parametrize("name", ["programs", "python_state", "number_programs", "object_turns", "conformance"])
def test_each_source_passes_for_seed_0(name: str) -> None:
    assert SOURCES[name](0) == ""


def test_disagreeing_program_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is a fake one; test_random_programs.py runs real programs."""
    from cases.random_programs import runner  # imported here because the child processes of the test above import this module

    record = {"kind": "wrong strides", "detail": "(4, 1), not (1, 3)", "reproducer": "def program(x): ..."}
    monkeypatch.setattr(runner, "run_one", lambda seed: {**record, "outcome": "disagrees" if seed == 5 else "agrees"})
    assert "disagrees" in runner.BAD
    assert "agrees" not in runner.BAD
    assert command.main(["--only", "programs:4"]) == 0
    capsys.readouterr()
    assert command.main(["--only", "programs:5"]) == 1
    assert capsys.readouterr().out.splitlines() == ["disagrees", *record.values()]


@pytest.mark.parametrize("only", ["wrong:3", "passing", "passing:x"])
def test_invalid_option_only_is_refused(only: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--only", only], {"passing": passing})
    assert ended.value.code == 2
    assert "SOURCE is one of passing" in capsys.readouterr().err
