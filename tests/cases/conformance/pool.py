"""The worker processes, one for each shard. Each runs one case after another.

If a process dies, or does not answer in time, the case that it was running fails, and a new process replaces it.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from support.paths import TESTS

from .entries import Case

COMMAND = (sys.executable, "-m", "cases.conformance.worker")
START_SECONDS = 300.0
# A process that uses more memory than this is replaced after its case.
KILOBYTES = 3 << 20

Result = dict[str, Any]


def run_all(
    cases: Iterable[Case],
    shards: int,
    record: Callable[[Result], None],
    *,
    max_samples: int | None,
    together: int,
    silence_seconds: float,
    log: Path,
    command: Sequence[str] | None = None,
) -> None:
    """Runs all cases.

    Args:
        record: Called with each result, by one thread at a time.
        max_samples: See worker.run_case, as for `together`.
        silence_seconds: The time limit of a call.
        log: Output of workers is written to files next to this path.
        command: The command that starts a worker, if it is not COMMAND.
    """
    waiting: queue.SimpleQueue[Case] = queue.SimpleQueue()
    for case in cases:
        waiting.put(case)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def serve(number: int) -> None:
        worker = Worker(log.with_suffix(f".{number}.log"), command or COMMAND)
        try:
            while not errors:
                try:
                    case = waiting.get_nowait()
                except queue.Empty:
                    return
                result = worker.run(case, max_samples, together, silence_seconds)
                with lock:
                    record(result)
        except BaseException as error:
            errors.append(error)
        finally:
            worker.stop()

    threads = [threading.Thread(target=serve, args=(number,)) for number in range(shards)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Worker:
    """A worker process, which is started again after it dies or is stopped.

    Args:
        log: The file for the output of the process.
    """

    def __init__(self, log: Path, command: Sequence[str]) -> None:
        self.log, self.command = log, command
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        self._read = b""

    def run(self, case: Case, max_samples: int | None, together: int, silence_seconds: float) -> Result:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        request = {"case": [case.database, case.name, case.dtype, case.kind], "max_samples": max_samples, "together": together}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        sample, complete = -1, max_samples is None
        while True:
            try:
                message = self._receive(silence_seconds)
            except TimeoutError:
                self.stop()
                return _lost(case, sample, "hangs", f"no answer for {silence_seconds:.0f} seconds", complete)
            except EOFError:
                code = self._process.wait()
                self.stop()
                name = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                return _lost(case, sample, "crashes", name, complete)
            if "sample" in message:
                sample = message["sample"]
                continue
            if message["kilobytes"] > KILOBYTES:
                self.stop()
            return message

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            os.close(self._answers)
            self._process, self._read = None, b""

    def _start(self) -> None:
        self._answers, worker_end = os.pipe()
        with self.log.open("ab") as log:
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])}
            self._process = subprocess.Popen(
                [*self.command, str(worker_end)], env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[worker_end]
            )
        os.close(worker_end)
        try:
            self._receive(START_SECONDS)
        except EOFError:
            self.stop()
            raise RuntimeError(f"a worker did not start: see {self.log}") from None

    def _receive(self, seconds: float) -> Result:
        """Returns the next message of the process.

        Raises:
            TimeoutError: There is no message in time.
            EOFError: The process has ended.
        """
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], seconds)
            if not ready:
                raise TimeoutError
            data = os.read(self._answers, 1 << 16)
            if not data:
                raise EOFError
            self._read += data
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)


def _lost(case: Case, sample: int, label: str, text: str, complete: bool) -> Result:
    """Returns the result of a case whose process was lost at a sample. The counts of earlier samples are lost too."""
    return {
        "case": str(case),
        "passed": 0,
        "skipped": {},
        "failed": {label: 1},
        "notes": {},
        "examples": {label: {"sample": f"{sample}", "message": text}},
        "executed": [],
        "fallback": [],
        "complete": complete,
        "seconds": 0.0,
    }
