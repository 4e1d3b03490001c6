"""Exports a PyTorch model as StableHLO, and runs it in a process without torch.

    python examples/export_stablehlo.py --output exported

A small transformer is exported with dynamic batch and length, for CPUs, GPUs and TPUs, and saved. A second process, in which `import torch`
fails, loads and calls the model with JAX alone. The results must agree.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.export import Dim

import dynaxla

SHAPES = ((2, 7), (5, 12), (1, 3))
WITHOUT_TORCH = """
import sys

sys.modules["torch"] = None  # import torch fails from here on
import numpy as np
import dynaxla

folder = sys.argv[1]
model = dynaxla.load(folder + "/model")
arrays = np.load(folder + "/given.npz")
np.savez(folder + "/found.npz", **{name: np.asarray(model.call(arrays[name])) for name in arrays.files})
"""


class Classifier(nn.Module):
    """Classifies sequences of tokens by the mean of a transformer layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.table(tokens)).mean(1))


def export_to(folder: Path) -> float:
    """Exports the model, calls it without torch, and returns the largest difference from eager mode."""
    torch.manual_seed(0)
    model = Classifier().eval()
    calls = {f"{batch} by {length}": torch.randint(0, 100, (batch, length)) for batch, length in SHAPES}
    example = next(iter(calls.values()))
    exported = dynaxla.export(model, (example,), dynamic_shapes=({0: Dim("batch"), 1: Dim("length", max=512)},))
    exported.save(folder / "model", overwrite=True)
    print(f"{folder / 'model'}: takes {', '.join(map(str, exported.manifest.inputs))}, for {', '.join(exported.platforms)}")
    np.savez(folder / "given.npz", **{name: tokens.numpy() for name, tokens in calls.items()})
    subprocess.run([sys.executable, "-c", WITHOUT_TORCH, str(folder)], check=True)
    outputs = np.load(folder / "found.npz")
    with torch.no_grad():
        return max(float(np.abs(outputs[name] - model(tokens).numpy()).max()) for name, tokens in calls.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="The output directory; by default, one that is deleted at the end.")
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as temporary:
        folder = output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        difference = export_to(folder)
    print(f"without torch, {len(SHAPES)} shapes differ from eager mode by at most {difference:.0e}")
    if difference > 1e-5:
        raise SystemExit("the results differ")


if __name__ == "__main__":
    main()
