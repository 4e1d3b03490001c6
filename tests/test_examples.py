"""The examples run, and say what they promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from patience import PATIENCE

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_char_gpt(tmp_path: Path) -> None:
    picture = tmp_path / "gpt.png"
    text = run(str(EXAMPLES / "train_char_gpt.py"), "--steps", "12", "--output", str(picture))
    distances = [float(found) for found in re.findall(r"at most (\S+) from eager", text)]
    assert len(distances) == 3
    assert max(distances) < 1e-4
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_mnist_like() -> None:
    text = run(str(EXAMPLES / "train_mnist_like.py"))
    assert len(re.findall(r"accuracy 9[789]", text)) == 3
