"""Programs of their own, for what a process that has run other tests cannot show."""

from __future__ import annotations

import os
import subprocess
import sys

from patience import PATIENCE


def run_script(script: str, **variables: str) -> str:
    """What a program prints that is run in another process, which finds the modules that this one finds. variables: more of its
    environment. Fails with the end of what it says on stderr, if it fails."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **variables}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
