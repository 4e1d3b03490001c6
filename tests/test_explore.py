"""`make explore` draws other things each time, says what has failed and how to repeat it, and survives crashes."""

from __future__ import annotations

import itertools
import os
import re
import signal
from types import SimpleNamespace

import pytest
from explore import __main__ as command
from explore.sources import SOURCES
from random_programs import faults, runner

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
    if seed % 1_000_000 == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return ""


def test_a_planted_failure_is_found_and_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    sources = {"right": right, "planted": planted}
    assert command.main([*SECOND, "--seed", "7"], sources) == 1
    printed = capsys.readouterr().out
    assert "--seed 7\n" in printed
    assert "7000002 is wrong" in printed
    (repeated,) = re.findall(r'repeat: make explore ARGS="(--only planted:\d+)"', printed)
    assert command.main(repeated.split(), sources) == 1
    assert command.main(["--only", "planted:7000003"], sources) == 0


def test_nothing_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    runs = [(command.main(SECOND, {"right": right}), capsys.readouterr().out.splitlines()) for _ in range(2)]
    assert [status for status, _ in runs] == [0, 0]
    assert all(lines[-1].endswith("right: 0 failed") for _, lines in runs)
    assert runs[0][1][0] != runs[1][1][0], "another seed each time"


def test_a_crash_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*SECOND, "--seed", "1"], {"crashing": crashing}) == 1
    printed = capsys.readouterr().out
    assert 'crashed, or was silent for too long\nrepeat: make explore ARGS="--only crashing:1000001"' in printed
    assert printed.splitlines()[-1].endswith("crashing: 1 failed")


@pytest.mark.parametrize("name", ["programs", "surroundings", "conformance"])
def test_sources(name: str) -> None:
    assert [SOURCES[name](seed) for seed in range(2)] == ["", ""]


def test_a_wrong_program_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    fault = faults.FAULTS["result_is_contiguous"]
    found = faults.find(fault, faults.Programs(runner.seeds(0, 40)))
    assert found is not None
    _, seed, verdict = found
    with fault():
        assert command.main(["--only", f"programs:{seed}"]) == 1
    assert verdict.kind in capsys.readouterr().out


@pytest.mark.parametrize("only", ["wrong:3", "right", "right:x"])
def test_a_request_that_means_nothing(only: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main(["--only", only], {"right": right})
    assert ended.value.code == 2
    assert "SOURCE is one of right" in capsys.readouterr().err
