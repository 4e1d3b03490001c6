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
    names = ("train_mnist_like", "torch_model_in_jax", "export_stablehlo")
    commands = [gpt, *[[str(EXAMPLES / f"{name}.py")] for name in names], [str(EXAMPLES / "jax_kernel_in_torch.py"), "--steps", "5"]]
    of_gpt, of_mnist, of_jax, of_export, of_kernel, _ = run_script(SCRIPT.replace("COMMANDS", repr(commands))).split("end\n")
    distances = [float(found) for found in re.findall(r"at most (\S+) from eager", of_gpt)]
    assert len(distances) == 3
    assert max(distances) < 1e-4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(re.findall(r"accuracy 9[789]", of_mnist)) == 3
    losses = [float(found) for found in re.findall(r"loss (\S+)", of_jax)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 10
    assert float(re.findall(r"at most (\S+) from that", of_kernel)[0]) < 1e-4
    assert "takes tokens: int64[batch, length], for cpu, cuda, tpu" in of_export
    assert "without torch, 3 shapes differ" in of_export
    assert {path.name for path in EXAMPLES.glob("*.py")} == {Path(command[0]).name for command in commands}
