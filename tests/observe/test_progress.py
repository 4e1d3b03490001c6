"""Tests of progress lines of long compilations."""

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
    """A terminal as stderr, with a line every tenth of a second."""
    stream = Terminal()
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=stream))  # pytest sets sys.stderr between fixtures and test
    monkeypatch.delenv("DYNAXLA_PROGRESS", raising=False)
    monkeypatch.setattr(progress, "FIRST_LINE", 0.1)
    monkeypatch.setattr(progress, "LINE_INTERVAL", 0.1)
    monkeypatch.setattr(progress, "_THREAD_AFTER", -1.0)
    return stream


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dynaxla progress"]


def compile_for(seconds: float, reports: Progress | None = None) -> Progress:
    reports = reports or Progress()
    outer = reports.begin("capture", "dynaxla_0")
    token = reports.begin("compile", "dynaxla_0_forward")
    time.sleep(seconds)
    assert token is not None
    assert outer is not None
    reports.end(token)
    reports.end(outer)
    return reports


def wait_for_watchers() -> None:
    for thread in watchers():
        thread.join(10)
    assert not watchers(), "the thread must end with the phase"


def test_long_compilation_prints_lines(terminal: Terminal) -> None:
    reports = compile_for(0.35)
    wait_for_watchers()
    lines = terminal.getvalue().splitlines()
    assert 2 <= len(lines) <= 3
    assert lines[0] == "dynaxla has been compiling for 0 s: graph 1 of 1 so far, dynaxla_0_forward: XLA compiles it (0 s)"
    token = reports.begin("trace", "dynaxla_1_inference")
    time.sleep(0.2)
    reports.end(token)
    wait_for_watchers()
    assert "graph 2 of 2 so far, dynaxla_1_inference: JAX traces it" in terminal.getvalue()


def test_short_compilation_starts_no_thread(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_THREAD_AFTER", 60.0)
    reports = Progress()
    token = reports.begin("compile", "dynaxla_0_forward")
    assert not watchers()
    reports.end(token)
    token = reports.begin("capture", "dynaxla_1", nodes=10_000)
    assert watchers(), "the capture of a large graph must start a thread"
    reports.end(token)
    wait_for_watchers()
    assert reports.begin("execute", "") is None
    assert terminal.getvalue() == ""


def test_lines_are_logged_or_disabled(terminal: Terminal, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
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


def test_loop_with_rare_compilations_prints_nothing(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SPARSE_AFTER", 0.05)
    reports = Progress()
    for _ in range(4):
        compile_for(0.02, reports)
        time.sleep(0.08)
    wait_for_watchers()
    assert terminal.getvalue() == ""


def test_failure_ends_the_thread(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = Progress()
    monkeypatch.setattr(progress, "begin", reports.begin)
    monkeypatch.setattr(progress, "end", reports.end)
    with pytest.raises(KeyboardInterrupt), metrics.timed("compile", "dynaxla_0_forward"):
        raise KeyboardInterrupt
    wait_for_watchers()


def test_compiled_call_and_fork_in_a_terminal() -> None:
    """The forked child has no thread and no phase. The process can end during a phase."""
    process = completed(_SCRIPT)
    assert process.returncode == 0, process.stdout + process.stderr
    assert "graph 1 of 1 so far, dynaxla_0" in process.stderr
    assert process.stdout == "0\n"


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
def test_call_without_compilation_begins_no_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile(torch.nn.Linear(4, 4), backend="dynaxla")
    x = torch.randn(2, 4)
    compiled(x)
    monkeypatch.setattr(progress, "begin", None)
    compiled(x)
