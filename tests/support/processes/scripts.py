"""Runs a script in another process, for tests that a process with earlier tests in it cannot make."""

from __future__ import annotations

import atexit
import functools
import re
import subprocess
import sys
from collections.abc import Sequence

from support.processes.fork_server import ForkServer, found_here
from support.processes.time_limits import PATIENCE


@functools.cache
def _server() -> ForkServer:
    server = ForkServer()
    atexit.register(server.close)
    return server


def completed(script: str, arguments: Sequence[str] = (), own: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
    """A program that is run in another process, which finds the modules that this one finds. variables: more of its environment.

    In a child of a process that has imported torch and JAX, unless `own` says that the program is about imports, or about how a process
    starts or uses memory: then it has an interpreter of its own. So has one with a variable that others may read when they are imported;
    XLA reads its own when it is first used.
    """
    environment = found_here() | variables
    if sys.platform == "linux" and not own and all(name.startswith(("DYNAXLA_", "XLA_FLAGS")) for name in variables):
        return _without_tritons_leaks(_server().run(script, arguments, environment))
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return _without_tritons_leaks(done)


# A CUDA build of torch comes with triton, whose binding prints this as a process ends that has imported it.
_LEAKS = re.compile(r"(nanobind: leaked .*\n( - .*\n)*)+nanobind: this is likely .*\nSee https://nanobind\S*\.html\n?")


def _without_tritons_leaks(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    done.stderr = _LEAKS.sub(lambda found: "" if "triton" in found[0] else found[0], done.stderr)
    return done


def run_script(script: str, arguments: Sequence[str] = (), own: bool = False, **variables: str) -> str:
    """What such a program prints. Fails with the end of what it says on stderr, if it fails."""
    done = completed(script, arguments, own, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
