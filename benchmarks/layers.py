"""CPU seconds of the first call of a decoder with many equal layers: `python -m benchmarks.layers LAYERS KIND`, in its own process.

Equal layers are lowered and compiled once, so the time after capture (by TorchDynamo and AOTAutograd) should hardly grow with their number.
With `torch.compiler.nested_compile_region` around a layer's forward pass, TorchDynamo captures it once, too. Caches are empty, and there is
one thread. Work that is done once per process is not counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import torch

from dynaxla.observe import metrics

from . import ROOT, generation, tables
from .first_call import PHASES
from .second_start import cpu_seconds, environment

LAYERS = (12, 48)
# The values of KIND.
PLAIN, REGION = "plain", "region"
LENGTH = 256


def runs() -> dict[str, dict[str, dict[str, float]]]:
    """Returns CPU seconds by kind and number of layers: "cpu" (of the whole call) and "after" (after capture)."""
    with tempfile.TemporaryDirectory() as bytecode:
        return {kind: {str(count): measure(kind, count, bytecode) for count in LAYERS} for kind in (PLAIN, REGION)}


def measure(kind: str, layers: int, bytecode: str) -> dict[str, float]:
    """Measures in a fresh process with empty caches. `bytecode` is the directory in which the processes share Python's bytecode."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, "-m", "benchmarks.layers", str(layers), kind]
        done = subprocess.run(command, cwd=ROOT, env=environment(cache, bytecode), stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def table(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[str]:
    """Returns lines of Markdown. `found` is a result of `runs`."""
    few, many = map(str, LAYERS)
    lines = [
        f"CPU seconds of dynaxla's first call of a decoder with {few} and with {many} equal layers, with empty caches. *After capture*:",
        "the part of the call after the capture by TorchDynamo and AOTAutograd, that is lowering and compilation by XLA. *region*: each",
        "layer's forward pass is a `torch.compiler.nested_compile_region`. *plain*: it is not.",
        "",
        *tables.heading(
            ["", *(f"{what}{number}" for what in ("layers: ", "after capture: ") for number in (few, many, f"{many} / {few}"))]
        ),
    ]
    for kind, measured in found.items():
        cells: list[str] = []
        for what in ("cpu", "after"):
            one, other = measured[few][what], measured[many][what]
            cells += [f"{one:.2f}", f"{other:.2f}", f"{other / one:.2f}"]
        lines.append(tables.line([kind, *cells]))
    return lines


def _measure(layers: int, kind: str) -> dict[str, float]:
    torch.set_num_threads(1)
    metrics.use_clock(time.process_time)
    _first_call(1, kind)
    torch._dynamo.reset()
    before = metrics.seconds()
    cpu = _first_call(layers, kind)
    after = metrics.seconds()
    return {"cpu": cpu, "after": sum(after.get(phase, 0.0) - before.get(phase, 0.0) for phase in PHASES)}


def _first_call(layers: int, kind: str) -> float:
    """Returns CPU seconds of the first call."""
    torch.manual_seed(0)
    # The rehearsal (one layer) has another length, so that its programs are not found again.
    model: Any = generation.decoder(LENGTH if layers > 1 else LENGTH // 2, layers=layers).eval().requires_grad_(False)
    if kind == REGION:
        model = _of_regions(model)
    (token,) = generation.tokens(1, torch.Generator().manual_seed(1))
    with torch.no_grad():
        started = cpu_seconds()
        torch.compile(model, backend="dynaxla")(token)
        return cpu_seconds() - started


def _of_regions(model: torch.nn.Module) -> torch.nn.Module:
    """Returns the model with each layer's forward pass as a compile region: one function, called with each layer."""

    @torch.compiler.nested_compile_region
    def region(layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)

    class Regions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = region(layer, x)
            return x

    return Regions()


if __name__ == "__main__":
    print(json.dumps(_measure(int(sys.argv[1]), sys.argv[2])))
