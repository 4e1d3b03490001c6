"""Self-tests of this installation in child processes: whether a private way computes what it should here, where a wrong answer, or the end
of the process, would be the first sign that it does not."""

from __future__ import annotations

import hashlib
import logging
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from .store import Keeper

log = logging.getLogger("dynaxla")

# A self-test takes three seconds of a core; a machine may be busy.
_TIMEOUT_SECONDS = 120
# Settings of the user's XLA would decide for later processes, too.
_LEFT_OUT = ("XLA_FLAGS", "JAX_PLATFORM_NAME", "JAX_ENABLE_X64", "JAX_DISABLE_JIT")


def results(script: Path, subjects: Sequence[str], facts: Sequence[str], store: Keeper | None) -> Mapping[str, str] | None:
    """The results of a self-test, from the store or from a child process that runs it now.

    Args:
        script: a Python file that imports nothing of dynaxla. For each argument it prints one line, "SUBJECT right" or "SUBJECT" and a
            reason, at once.
        subjects: the script's arguments.
        facts: all that decides the results besides the script: versions, the processor.
        store: keeps the results for later processes.

    Returns:
        "" for each subject that is right, the reason for each other one. None if the results are not known: nothing can be kept, so that
        each process would have to run the self-test, or no child process can be started.
    """
    if store is None:
        return None
    try:
        source = script.read_bytes()
    except OSError:  # in an archive
        return None
    digest = hashlib.blake2b(source, digest_size=16)
    digest.update("\0".join([*subjects, *facts]).encode())
    key = f"{script.stem}-{digest.hexdigest()}"
    kept = store.get(key)
    if kept is None:
        found = _run(script, subjects)
        if found is None:
            return None
        kept = found.encode()
        store.put(key, kept)
    lines = dict(line.partition(" ")[::2] for line in kept.decode().splitlines())
    return {subject: "" if (line := lines.get(subject, "the self-test's process ended")) == "right" else line for subject in subjects}


def _run(script: Path, subjects: Sequence[str]) -> str | None:
    """The lines that the script prints; None if no process of this Python can run it."""
    environment = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    environment["JAX_PLATFORMS"] = "cpu"
    command = [sys.executable, "-P", str(script), *subjects]
    try:
        if not sys.executable or "python" not in Path(sys.executable).name.lower():  # embedded: it is another program
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
