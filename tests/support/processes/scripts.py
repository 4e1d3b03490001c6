"""Runs a script in another process, for tests that need a process without the effects of earlier tests."""

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
    """Runs a program in another process, which finds the same modules as this process.

    The process is a fork of a process that has imported torch and JAX. With `own`, and if torch or JAX may read one of the variables when
    they are imported, it is a new interpreter instead. XLA reads XLA_FLAGS when it is first used.

    Args:
        script: the source of the program.
        arguments: its command line arguments.
        own: True for tests of imports, of the start of a process, or of memory.
        variables: more environment variables.
    """
    environment = found_here() | variables
    if sys.platform == "linux" and not own and all(name.startswith(("DYNAXLA_", "XLA_FLAGS")) for name in variables):
        return _without_tritons_leaks(_server().run(script, arguments, environment))
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    return _without_tritons_leaks(done)


# triton, which a CUDA build of torch installs, prints this text at the end of a process that has imported it.
_LEAKS = re.compile(r"(nanobind: leaked .*\n( - .*\n)*)+nanobind: this is likely .*\nSee https://nanobind\S*\.html\n?")


def _without_tritons_leaks(done: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
    done.stderr = _LEAKS.sub(lambda match: "" if "triton" in match[0] else match[0], done.stderr)
    return done


def run_script(script: str, arguments: Sequence[str] = (), own: bool = False, **variables: str) -> str:
    """Runs a program as `completed` does, and returns its output. Fails with the end of stderr if the program fails."""
    done = completed(script, arguments, own, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
