"""Tests of Ctrl-C while C++ code runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from dynaxla.runtime import interruptible

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of other systems")


@pytest.fixture(autouse=True)
def default_sigint_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell start without this handler
    yield
    signal.signal(signal.SIGINT, before)


def test_call_returns_the_result_or_raises_the_exception() -> None:
    assert interruptible.call(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError) as raised:
        interruptible.call(lambda: 1 / 0)
    assert raised.traceback[-1].name == "<lambda>"


def test_call_uses_another_thread_only_if_interrupts_are_possible() -> None:
    assert interruptible.call(threading.get_ident) != threading.get_ident()
    own: list[bool] = []
    thread = threading.Thread(target=lambda: own.append(interruptible.call(threading.get_ident) == threading.get_ident()))
    thread.start()
    thread.join()
    assert own == [True], "only the main thread receives signals"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert interruptible.call(threading.get_ident) == threading.get_ident()
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupt_ends_the_wait_but_not_the_call() -> None:
    ended = threading.Event()

    def work() -> None:
        time.sleep(0.8)
        ended.set()

    timer = threading.Timer(0.1, signal.pthread_kill, [threading.get_ident(), signal.SIGINT])
    timer.start()
    start = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        interruptible.call(work)
    assert time.perf_counter() - start < 0.7
    assert not ended.is_set()
    assert ended.wait(10)
    timer.join()


# The script prolongs its compilation, and interrupts itself meanwhile.
_SCRIPT = """
import os, signal, sys, threading, time, torch
from dynaxla.runtime import interruptible

signal.signal(signal.SIGINT, signal.default_int_handler)
begun = []

def call(function):
    threading.Timer(0.3, os.kill, [os.getpid(), signal.SIGINT]).start()
    begun.append(time.perf_counter())
    return known(lambda: (time.sleep(1.5), function())[1])

known, interruptible.call = interruptible.call, call
net = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Softmax(-1))
compiled = torch.compile(net, backend="dynaxla", options={"cache": ""})
x = torch.randn(2, 16)
{rest}
"""
_CAUGHT = """
try:
    compiled(x)
except KeyboardInterrupt:
    assert time.perf_counter() - begun[0] < 1.2
interruptible.call = known
torch.testing.assert_close(compiled(x), net(x))
print("right")
"""


def run(rest: str) -> subprocess.CompletedProcess[str]:
    code = _SCRIPT.replace("{rest}", rest)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)


def test_a_later_call_compiles_again() -> None:
    process = run(_CAUGHT)
    assert (process.returncode, process.stdout) == (0, "right\n"), process.stderr


def test_interrupted_process_ends_as_python_does() -> None:
    process = run("compiled(x)")
    assert process.returncode == -signal.SIGINT, process.stderr
    *trace, last, note = process.stderr.strip().splitlines()
    assert last == "KeyboardInterrupt"
    assert note == "dynaxla: the process ends when XLA has finished a compilation; Ctrl-C ends it at once"
    assert len(trace) < 60, process.stderr


def test_second_interrupt_ends_the_process_at_once() -> None:
    start = time.perf_counter()
    process = run(
        # The second interrupt may arrive before the process waits for its call, so it is repeated.
        "time.sleep = lambda _: threading.Event().wait()\n"
        "for seconds in range(3, 60, 3):\n"
        "    timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT])\n"
        "    timer.daemon = True\n"
        "    timer.start()\n"
        "compiled(x)"
    )
    assert process.returncode == -signal.SIGINT, process.stderr
    assert time.perf_counter() - start < 100, "the process has not ended at once"
