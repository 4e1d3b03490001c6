"""Tests of the examples: they run, and print the expected results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.paths import ROOT
from support.processes.device_checks import NEEDS_DEVICE
from support.processes.scripts import run_script
from support.timing import quick_compilation

EXAMPLES = ROOT / "examples"

# Runs the examples as scripts in one process, because starting a process takes as long as training a network. Uses one thread, like other
# tests, and quick compilation by XLA, because the test does not check the compiled code.
SCRIPT = """
import runpy, sys, torch
torch.set_num_threads(1)
for command in COMMANDS:
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
    print("end")
"""


@pytest.mark.thorough
def test_examples(tmp_path: Path) -> None:
    picture = tmp_path / "gpt.png"
    gpt = [str(EXAMPLES / "train_char_gpt.py"), "--steps", "12", "--layers", "1", "--output", str(picture)]
    names = ("train_mnist_like", "torch_model_in_jax", "export_stablehlo")
    commands = [gpt, *[[str(EXAMPLES / f"{name}.py")] for name in names], [str(EXAMPLES / "jax_kernel_in_torch.py"), "--steps", "5"]]
    printed = run_script(SCRIPT.replace("COMMANDS", repr(commands)), XLA_FLAGS=quick_compilation.flags())
    gpt_output, mnist_output, jax_output, export_output, kernel_output, _ = printed.split("end\n")
    distances = [float(value) for value in re.findall(r"at most (\S+) from eager", gpt_output)]
    assert len(distances) == 3
    assert max(distances) < 1e-4
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert len(re.findall(r"accuracy 9[789]", mnist_output)) == 3
    losses = [float(value) for value in re.findall(r"loss (\S+)", jax_output)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] / 10
    assert float(re.findall(r"at most (\S+) from that", kernel_output)[0]) < 1e-4
    assert "takes tokens: int64[batch, length], for cpu, cuda, tpu" in export_output
    assert "without torch, 3 shapes differ" in export_output
    others = {"train_on_a_mesh.py", "unet3d_on_a_mesh.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == {Path(command[0]).name for command in commands} | others


# Needs its own process: the device and the number of virtual devices cannot be changed later. torchvision's ops may have to be declared.
ON_A_MESH = """
import runpy, sys, torch
from dynaxla.bench import suites
torch.set_num_threads(1)
if not {"linear", "unet3d_on_a_mesh.py"} & {part.rpartition("/")[2] for part in sys.argv}:
    suites.import_package("torchvision")
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def losses_of(name: str, *arguments: str) -> list[float]:
    printed = run_script(ON_A_MESH, [str(EXAMPLES / name), *arguments], own=True)
    return [float(loss) for loss in re.findall(r"loss (\S+)", printed)]


@NEEDS_DEVICE
@pytest.mark.slow
@pytest.mark.parametrize("workload", ["linear --way batch", "linear --way megatron-lm", "linear --way fsdp", "gpt2", "resnet50"])
def test_training_on_a_mesh(workload: str) -> None:
    """The twenty losses of eight devices equal those of one device, with dropout."""
    expected, losses = (losses_of("train_on_a_mesh.py", *workload.split(), "--devices", devices) for devices in ("1", "8"))
    assert len(expected) == len(losses) == 20
    assert max(abs(loss - expected_loss) for loss, expected_loss in zip(expected, losses, strict=True)) < 1e-5
    assert losses[-1] < losses[0]


@NEEDS_DEVICE
@pytest.mark.slow
def test_unet3d_on_a_mesh() -> None:
    """The first losses equal those of one device."""
    losses = losses_of("unet3d_on_a_mesh.py")[:20]
    expected = losses_of("unet3d_on_a_mesh.py", "--devices", "1", "--score", "0")[:20]
    assert max(abs(loss - expected_loss) for loss, expected_loss in zip(expected, losses, strict=True)) < 1e-5
