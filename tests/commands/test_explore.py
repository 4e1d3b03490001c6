"""`make explore` draws other things each time, says what has failed and how to repeat it, and survives crashes."""

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
    """It goes by a twentieth of a second each time it is read."""
    now = itertools.count(0.0, 0.05)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: next(now)))


def right(seed: int) -> str:
    return ""


def planted(seed: int) -> str:
    """Wrong in the third draw."""
    return f"{seed} is wrong" if seed % 1_000_000 == 2 else ""


def crashing(seed: int) -> str:
    """Crashes in the second draw."""
    if seed % 1_000_000 == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return ""


class Here:
    """An explorer without another process."""

    def judge(self, source: Source, seed: int) -> str:
        return source(seed)

    def close(self) -> None: ...


@pytest.mark.thorough
def test_failures_and_crashes_are_found_and_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    """Who crashes is followed by another process, which goes on."""
    sources = {"right": right, "planted": planted, "crashing": crashing}
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


def test_nothing_wrong(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "Explorer", Here)
    runs = [(command.main(SECOND, {"right": right}), capsys.readouterr().out.splitlines()) for _ in range(2)]
    assert [status for status, _ in runs] == [0, 0]
    assert all(lines[-1].endswith("right: 0 failed") for _, lines in runs)
    assert runs[0][1][0] != runs[1][1][0], "another seed each time"


@pytest.mark.parametrize("name", ["programs", "python_state", "number_programs", "object_turns", "conformance"])
def test_sources(name: str) -> None:
    assert SOURCES[name](0) == ""


def test_a_wrong_program_is_found(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """test_random_programs.py finds real ones."""
    from cases.random_programs import runner  # here, since the processes of the test above import this module

    record = {"kind": "wrong strides", "detail": "(4, 1), not (1, 3)", "reproducer": "def program(x): ..."}
    monkeypatch.setattr(runner, "run_one", lambda seed: {**record, "outcome": "disagrees" if seed == 5 else "agrees"})
    assert "disagrees" in runner.BAD
    assert "agrees" not in runner.BAD
    assert command.main(["--only", "programs:4"]) == 0
    capsys.readouterr()
    assert command.main(["--only", "programs:5"]) == 1
    assert capsys.readouterr().out.splitlines() == ["disagrees", *record.values()]


@pytest.mark.parametrize("only", ["wrong:3", "right", "right:x"])
def test_a_request_that_means_nothing(only: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--only", only], {"right": right})
    assert ended.value.code == 2
    assert "SOURCE is one of right" in capsys.readouterr().err
