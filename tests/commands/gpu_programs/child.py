"""The process of one model: `python -m commands.gpu_programs.child RESULTS CELL...` appends a line of JSON for each compiled cell."""

from __future__ import annotations

from . import fakes  # isort: skip  (before torch)

import gc
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from torch import nn

from commands.compiled_programs import results
from commands.compiled_programs.hlo import Figures

from .models import Cell, case, inputs
from .programs import Compiled, programs


def main(path: Path, names: list[str]) -> None:
    made: dict[str, nn.Module] = {}
    for name in names:
        cell = Cell(*name.split(" "))
        start = time.monotonic()
        line: dict[str, Any] = {"cell": name}
        try:
            if not made:
                made[cell.model] = case(cell.model).build()
            line["programs"] = _compiled(cell, made[cell.model])
        except Exception:
            line["error"] = traceback.format_exc()
        line["seconds"] = round(time.monotonic() - start, 1)
        results.add(path, line)
        gc.collect()


def _compiled(cell: Cell, real: nn.Module) -> dict[str, Any]:
    """Figures by kind of program."""
    real = real.to(memory_format=cell.memory_format)
    given = tuple(x.contiguous(memory_format=cell.memory_format) if x.dim() == 4 else x for x in inputs(cell.model))
    args = fakes.fake_inputs(given, cell.torch_dtype)
    fixed = fakes.fake_model(real.eval().requires_grad_(False), cell.torch_dtype)
    found = {item.phase: item for item in programs(fixed, *args)}
    frozen = {item.phase: item for item in programs(fixed, *args, options={"freeze": True})}
    found["frozen"] = frozen["inference"]
    trained = fakes.fake_model(real.train().requires_grad_(True), cell.torch_dtype)
    found |= {item.phase: item for item in programs(trained, *args, backward=True)}
    return {kind: _figures(item) for kind, item in found.items()}


def _figures(item: Compiled) -> dict[str, Any]:
    figures = Figures.of(item.text)
    memory = round(item.temporary_bytes / 2**20, 1)
    return {"kernels": figures.kernels, "moves": figures.moves, "memory_mib": memory, "calls": figures.calls}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
