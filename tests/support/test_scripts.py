"""Scripts in child processes behave as with `python -c`."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from support.processes import fork_server
from support.processes.scripts import completed

SCRIPT = """
import atexit, os, sys
atexit.register(print, "end")
print(__name__, sys.argv, os.environ["DYNAXLA_TEST_SCRIPT"], os.environ.get("DYNAXLA_TEST_LEFT"))
print(sorted({*globals()} - {"__annotations__"}))
print([name for name in sys.modules if name.startswith(("dynaxla", "pytest"))])
os.environ["DYNAXLA_TEST_LEFT"] = sys.ps1 = "what one script does to its process"
print("its last line", file=sys.stderr)
sys.exit(len(sys.argv))
"""


def test_forked_script_behaves_as_in_own_interpreter() -> None:
    forked, forked_again, own = (completed(SCRIPT, ["a", "b c"], own=own, DYNAXLA_TEST_SCRIPT="variable") for own in (False, False, True))
    assert (forked.returncode, forked.stderr) == (3, "its last line\n")
    assert "variable None" in forked.stdout
    assert forked.stdout.endswith("[]\nend\n")
    for other in (forked_again, own):
        assert (other.stdout, other.stderr, other.returncode) == (forked.stdout, forked.stderr, forked.returncode)


def test_exceptions_and_signals_set_the_return_code() -> None:
    failed = completed("raise ValueError('its own')")
    assert failed.returncode == 1
    assert failed.stderr.endswith("ValueError: its own\n")
    assert completed("import os; os.kill(os.getpid(), 9)").returncode == -9


@pytest.mark.skipif(sys.platform != "linux", reason="the fork server is used on Linux only")
def test_hanging_script_is_stopped_with_its_children(monkeypatch: pytest.MonkeyPatch) -> None:
    completed("")  # starts the server
    monkeypatch.setattr(fork_server, "PATIENCE", 1)
    start = time.monotonic()
    with pytest.raises(subprocess.TimeoutExpired):
        completed("import os, time; os.fork(); time.sleep(1000)")
    assert time.monotonic() - start < 500
    monkeypatch.undo()
    assert completed("print('the next one')").stdout == "the next one\n"
