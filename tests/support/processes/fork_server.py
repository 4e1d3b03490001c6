"""A process that has imported torch and JAX, and nothing of dynaxla, and forks for each script: importing takes seconds, a fork takes none.

Its children run a script as `python -c` does, to the interpreter's ordinary end.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

from support.processes.time_limits import PATIENCE

TASKS = Path("/proc/self/task")
WORD = 8  # bytes of each number on the connection


class ForkServer:
    """The side of the tests: starts the process, which ends when this one does."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        # torch reads TORCH_LOGS when it is imported, and no script may see another's.
        environment = {name: value for name, value in found_here().items() if name != "TORCH_LOGS"}
        command = [sys.executable, "-c", f"exec(__import__('support.processes.fork_server', fromlist=['serve']).serve({theirs.fileno()}))"]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
        theirs.close()

    def run(self, script: str, arguments: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """As subprocess.run does. Raises subprocess.TimeoutExpired after PATIENCE seconds."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as log:
            text = json.dumps([script, [*arguments], environment, os.getcwd()]).encode()
            socket.send_fds(self._connection, [_word(len(text))], [out.fileno(), log.fileno()])
            self._connection.sendall(text)
            self._connection.settimeout(PATIENCE)
            child = _number(self._connection)
            try:
                status = _number(self._connection)
            except BaseException as error:
                os.killpg(child, signal.SIGKILL)
                _number(self._connection)
                if isinstance(error, TimeoutError):
                    raise subprocess.TimeoutExpired(script, PATIENCE) from None
                raise
            out.seek(0)
            log.seek(0)
            return subprocess.CompletedProcess(script, status, out.read(), log.read())

    def close(self) -> None:
        self._connection.close()
        self._process.wait()


def found_here() -> dict[str, str]:
    """The environment of a process that finds the modules that this one finds."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def serve(file: int) -> CodeType:
    """Forks for each script that is asked for on this socket. Returns in the children alone: the program that each has to run."""
    for name in ("jax", "torch._dynamo", "torch._inductor.lowering", "torch.export._trace"):
        importlib.import_module(name)
    gc.freeze()  # children need not look at what they share
    connection = socket.socket(fileno=file)
    while True:
        start, files, _, _ = socket.recv_fds(connection, WORD, 2)
        if not start:
            sys.exit()
        script, arguments, environment, folder = json.loads(_received(connection, int.from_bytes(start)))
        assert threading.active_count() == len(list(TASKS.iterdir())) == 1, "what other threads hold would be held forever in the child"
        child = os.fork()
        if not child:
            break
        os.setpgid(child, child)  # it can be stopped with its own children
        for other in files:
            os.close(other)
        connection.sendall(_word(child))
        connection.sendall(_word(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    connection.close()
    for stream, its in enumerate(files, 1):
        os.dup2(its, stream)
        os.close(its)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[1:] = arguments
    return compile(script, "<string>", "exec", dont_inherit=True)


def _word(number: int) -> bytes:
    return number.to_bytes(WORD, signed=True)


def _number(connection: socket.socket) -> int:
    return int.from_bytes(_received(connection, WORD), signed=True)


def _received(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        assert part, "the other process has ended"
        found += part
    return found
