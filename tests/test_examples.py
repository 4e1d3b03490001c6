"""The examples run, and say what they promise."""

from __future__ import annotations

import re
from pathlib import Path

from scripts import run_script

EXAMPLES = Path(__file__).parents[1] / "examples"

# As Python runs them, one after the other: starting a process takes as long as training a network. On one thread, as other tests.
SCRIPT = """
import runpy, sys, torch
torch.set_num_threads(1)
for command in COMMANDS:
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
    print("end")
"""


def test_examples(tmp_path: Path) -> None:
    picture = tmp_path / "gpt.png"
    gpt = [str(EXAMPLES / "train_char_gpt.py"), "--steps", "12", "--layers", "1", "--output", str(picture)]
    commands = [gpt, [str(EXAMPLES / "train_mnist_like.py")]]
    of_gpt, of_mnist, _ = run_script(SCRIPT.replace("COMMANDS", repr(commands))).split("end\n")
    distances = [float(found) for found in re.findall(r"at most (\S+) from eager", of_gpt)]
    assert len(distances) == 3
    assert max(distances) < 1e-4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(re.findall(r"accuracy 9[789]", of_mnist)) == 3
    assert {path.name for path in EXAMPLES.glob("*.py")} == {Path(command[0]).name for command in commands}
