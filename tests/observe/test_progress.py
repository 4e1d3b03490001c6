"""Reports of long compilations: when there is a line, what it says, and where it goes."""

from __future__ import annotations

import io
import logging
import threading
import time
import types

import pytest
import torch

from dynaxla.observe import metrics, progress
from dynaxla.observe.progress import Progress
from support.processes.scripts import completed


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A terminal as stderr, and lines every tenth of a second."""
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=stream))  # pytest sets sys.stderr between fixtures and test
    monkeypatch.delenv("DYNAXLA_PROGRESS", raising=False)
    monkeypatch.setattr(progress, "FIRST_LINE", 0.1)
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0.1)
    monkeypatch.setattr(progress, "_THREAD_AFTER", -1.0)
    return stream


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dynaxla progress"]


def compile_for(seconds: float, found: Progress | None = None) -> Progress:
    found = found or Progress()
    outer = found.begin("capture", "dynaxla_0")
    token = found.begin("compile", "dynaxla_0_forward")
    time.sleep(seconds)
    assert token is not None
    assert outer is not None
    found.end(token)
    found.end(outer)
    return found


def wait_for_watchers() -> None:
    for thread in watchers():
        thread.join(10)
    assert not watchers(), "the thread ends with the phase"


def test_a_long_compilation_says_so_again_and_again(terminal: Terminal) -> None:
    found = compile_for(0.35)
    wait_for_watchers()
    lines = terminal.getvalue().splitlines()
    assert 2 <= len(lines) <= 3
    assert lines[0] == "dynaxla has been compiling for 0 s: graph 1 of 1 so far, dynaxla_0_forward: XLA compiles it (0 s)"
    token = found.begin("trace", "dynaxla_1_inference")
    time.sleep(0.2)
    found.end(token)
    wait_for_watchers()
    assert "graph 2 of 2 so far, dynaxla_1_inference: JAX traces it" in terminal.getvalue()


def test_a_short_one_starts_no_thread(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_THREAD_AFTER", 60.0)
    found = Progress()
    token = found.begin("compile", "dynaxla_0_forward")
    assert not watchers()
    found.end(token)
    token = found.begin("capture", "dynaxla_1", nodes=10_000)
    assert watchers(), "the capture of a large graph takes long"
    found.end(token)
    wait_for_watchers()
    assert found.begin("execute", "") is None
    assert terminal.getvalue() == ""


def test_lines_go_where_they_are_wanted(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("DYNAXLA_PROGRESS", "0")
    compile_for(0.2)
    assert not progress.is_enabled()
    monkeypatch.delenv("DYNAXLA_PROGRESS")
    with caplog.at_level(logging.INFO, logger="dynaxla"):
        compile_for(0.2)
        wait_for_watchers()
    assert "dynaxla has been compiling" in caplog.text
    assert terminal.getvalue() == ""
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=stream))
        assert not progress.is_enabled()


def test_a_loop_that_compiles_now_and_then_is_no_compilation(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SPARSE_AFTER", 0.05)
    found = Progress()
    for _ in range(4):
        compile_for(0.02, found)
        time.sleep(0.08)
    wait_for_watchers()
    assert terminal.getvalue() == ""


def test_a_failure_ends_the_report(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    found = Progress()
    monkeypatch.setattr(progress, "begin", found.begin)
    monkeypatch.setattr(progress, "end", found.end)
    with pytest.raises(KeyboardInterrupt), metrics.timed("compile", "dynaxla_0_forward"):
        raise KeyboardInterrupt
    wait_for_watchers()


def test_a_compiled_call_and_a_fork() -> None:
    """In a process with a terminal. Its child has no thread and no phase, and the process ends while a phase is in progress."""
    done = completed(_SCRIPT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "graph 1 of 1 so far, dynaxla_0" in done.stderr
    assert done.stdout == "0\n"


_SCRIPT = """
import os, sys, threading, torch
from dynaxla.observe import progress
sys.stderr.isatty = lambda: True
progress.FIRST_LINE, progress.LINE_INTERVAL, progress._THREAD_AFTER = 0.01, 0.05, -1.0
net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)], torch.nn.Softmax(-1))
torch.compile(net, backend="dynaxla", options={"cache": ""})(torch.randn(2, 64))
token = progress.begin("compile", "dynaxla_0_forward")
pid = os.fork()
if pid == 0:
    assert not progress._progress._phases
    progress.end(progress.begin("compile", "dynaxla_1_forward"))
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.quick
def test_a_call_that_compiles_nothing_does_not_come_here(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(torch.nn.Linear(4, 4), backend="dynaxla")
    x = torch.randn(2, 4)
    compiled(x)
    monkeypatch.setattr(progress, "begin", None)
    compiled(x)
