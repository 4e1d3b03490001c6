"""Self-tests that run in child processes, for features whose failure could crash the process or silently give wrong results."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .store import StoreProtocol

log = logging.getLogger("dynaxla")

# The timeout of a self-test, which takes three seconds of one core. The timeout allows for a busy machine.
_TIMEOUT_SECONDS = 120
# Environment variables that the child does not get, because the stored results must not depend on the user's settings of XLA and JAX.
_REMOVED_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORM_NAME", "JAX_ENABLE_X64", "JAX_DISABLE_JIT")


def results(script: Path, subjects: Sequence[str], environment: Sequence[str], store: StoreProtocol | None) -> Mapping[str, str] | None:
    """Returns the results of a self-test, from the store or from a child process that runs it now.

    Args:
        script: A Python file that does not import dynaxla. First it prints the line "started". Then it prints a line as soon as the test
            of an argument has ended: "SUBJECT passed", or "SUBJECT" and the reason of the failure.
        subjects: The script's arguments, which name the features to test.
        environment: Texts of the facts, other than the script, on which the results depend, such as versions and the processor.
        store: Stores the results for later processes.

    Returns:
        By subject, "" if its test passed, else the reason of the failure. None if the self-test does not run: there is no store (each
        process would have to run the test), the script is not a file, or no child process can run the script.
    """
    if store is None:
        return None
    try:
        source = script.read_bytes()
    except OSError:  # e.g. because dynaxla is imported from a zip archive
        return None
    digest = hashlib.blake2b(source, digest_size=16)
    digest.update("\0".join([*subjects, *environment]).encode())
    key = f"{script.stem}-{digest.hexdigest()}"
    data = store.get(key)
    if data is None:
        output = _run(script, subjects)
        if output is None:
            return None
        data = output.encode()
        store.put(key, data)
    lines = dict(line.partition(" ")[::2] for line in data.decode().splitlines())
    return {subject: "" if (line := lines.get(subject, "the self-test's process ended")) == "passed" else line for subject in subjects}


def _run(script: Path, subjects: Sequence[str]) -> str | None:
    """Returns the lines that the script prints; None if no child process of this Python can run it."""
    environment = {name: value for name, value in os.environ.items() if name not in _REMOVED_VARIABLES}
    environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-P", str(script), *subjects]
    try:
        if not sys.executable or "python" not in Path(sys.executable).name.lower():  # Python is embedded in another program
            return None
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, env=environment, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("no self-test of %s: %s", script.name, error)
        return None
    if done.returncode:
        log.debug("the self-test %s ended with %d: %s", script.name, done.returncode, done.stderr[-2000:])
        if not done.stdout.startswith("started"):
            return None
    return done.stdout
