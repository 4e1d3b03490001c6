"""A process that has imported torch and JAX, but not dynaxla, and forks for each script. An import takes seconds; a fork is fast.

The child processes run a script as `python -c` does, including the normal exit of the interpreter.
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
WORD = 8  # the size of a number on the connection, in bytes


class ForkServer:
    """The client: starts the server process, which ends with this process."""

    def __init__(self) -> None:
        self._connection, server_socket = socket.socketpair()
        # torch reads TORCH_LOGS when it is imported, so scripts with other values could not use this process.
        environment = {name: value for name, value in found_here().items() if name != "TORCH_LOGS"}
        command = [
            sys.executable,
            "-c",
            f"exec(__import__('support.processes.fork_server', fromlist=['serve']).serve({server_socket.fileno()}))",
        ]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=[server_socket.fileno()])
        server_socket.close()

    def run(self, script: str, arguments: Sequence[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Runs a script as subprocess.run does. Raises subprocess.TimeoutExpired after PATIENCE seconds."""
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
    """Returns an environment in which a process finds the same modules as this process."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def serve(file: int) -> CodeType:
    """Forks for each script that is requested on this socket. Returns only in child processes: the program to run.

    Args:
        file: the file descriptor of the socket.
    """
    for name in ("jax", "torch._dynamo", "torch._inductor.lowering", "torch.export._trace"):
        importlib.import_module(name)
    gc.freeze()  # garbage collection in child processes then skips shared objects
    connection = socket.socket(fileno=file)
    while True:
        start, files, _, _ = socket.recv_fds(connection, WORD, 2)
        if not start:
            sys.exit()
        script, arguments, environment, folder = json.loads(_received(connection, int.from_bytes(start)))
        assert threading.active_count() == len(list(TASKS.iterdir())) == 1, (
            "locks held by other threads would never be released in the child"
        )
        child = os.fork()
        if not child:
            break
        os.setpgid(child, child)  # its process group can be stopped as a whole
        for stream_file in files:
            os.close(stream_file)
        connection.sendall(_word(child))
        connection.sendall(_word(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
    connection.close()
    for stream, stream_file in enumerate(files, 1):
        os.dup2(stream_file, stream)
        os.close(stream_file)
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
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        assert part, "the other process has ended"
        data += part
    return data
