"""`make newest`: a report of facts about the installed releases, and of the quick tests.

The exit status is 1 if a test fails. A missing name alone is no failure, because there may be a fallback.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from commands.newest_report.facts import facts, versions
from support.paths import TESTS

# The parts of the report, each with its command: pytest, or a program in the environment.
CHECKS: dict[str, list[str]] = {
    "README's blocks": ["pytest", "docs/test_pages.py::test_blocks_run[../README]", "-m", "slow"],
    "the tests of make quick": ["pytest", "-n", "2", "--quick"],
    "ops by name": ["pytest", "test_torch_ops.py"],
    "private entry points": ["pytest", "runtime/test_private.py", "runtime/test_self_tests.py"],
    "traced graphs are kept": ["pytest", "capture/test_graph_cache.py"],
    "a training step": ["pytest", "training/test_objects_in_turns.py", "training/test_autocast_around_steps.py"],
    "the device": ["pytest", "device/test_registration.py", "device/test_modes.py"],
    "to_jax and export": ["pytest", "interop/test_torch_in_jax.py", "interop/test_export.py"],
    "doctor": ["dynaxla", "doctor"],
}
_LIMIT_SECONDS = 600
_SHOWN_LINES = 25


def main() -> int:
    print(versions(), flush=True)
    for heading, lines in facts().items():
        print(f"{heading}: {len(lines) or 'none'}", *(f"    {line}" for line in lines), sep="\n", flush=True)
    failed = [name for name, check in CHECKS.items() if not run(name, check)]
    print("failed: " + ", ".join(failed) if failed else "all checks passed")
    return int(bool(failed))


def run(name: str, check: list[str]) -> bool:
    """Runs a check, and returns True if it passes. If not, the end of its output is printed."""
    program, *arguments = check
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow and not gpu", *arguments]
    if program != "pytest":
        command = [str(Path(sys.executable).with_name(program)), *arguments]
    begin = time.monotonic()
    try:
        process = subprocess.run(command, cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=_LIMIT_SECONDS)
        passes, output = process.returncode == 0, process.stdout
    except subprocess.TimeoutExpired as error:
        partial_output = error.stdout or b""
        passes, output = (
            False,
            (partial_output if isinstance(partial_output, str) else partial_output.decode(errors="replace")) + "\nno end in time",
        )
    print(f"{'ok    ' if passes else 'FAILED'}  {name} ({time.monotonic() - begin:.0f} s)", flush=True)
    if not passes:
        lines = [line for line in output.splitlines() if "leaked" not in line]  # nanobind's messages at the exit of each process
        print("\n".join(f"        {line}" for line in lines[-_SHOWN_LINES:]), flush=True)
    return passes


if __name__ == "__main__":
    raise SystemExit(main())
