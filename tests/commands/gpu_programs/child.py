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
    models: dict[str, nn.Module] = {}
    for name in names:
        cell = Cell(*name.split(" "))
        start = time.monotonic()
        line: dict[str, Any] = {"cell": name}
        try:
            if not models:
                models[cell.model] = case(cell.model).build()
            line["programs"] = _compiled(cell, models[cell.model])
        except Exception:
            line["error"] = traceback.format_exc()
        line["seconds"] = round(time.monotonic() - start, 1)
        results.add(path, line)
        gc.collect()


def _compiled(cell: Cell, real: nn.Module) -> dict[str, Any]:
    """Returns the figures of a cell's programs, by kind."""
    real = real.to(memory_format=cell.memory_format)
    real_inputs = tuple(x.contiguous(memory_format=cell.memory_format) if x.dim() == 4 else x for x in inputs(cell.model))
    args = fakes.fake_inputs(real_inputs, cell.torch_dtype)
    fixed = fakes.fake_model(real.eval().requires_grad_(False), cell.torch_dtype)
    compiled = {program.phase: program for program in programs(fixed, *args)}
    frozen = {program.phase: program for program in programs(fixed, *args, options={"freeze": True})}
    compiled["frozen"] = frozen["inference"]
    trained = fakes.fake_model(real.train().requires_grad_(True), cell.torch_dtype)
    compiled |= {program.phase: program for program in programs(trained, *args, backward=True)}
    return {kind: _figures(program) for kind, program in compiled.items()}


def _figures(item: Compiled) -> dict[str, Any]:
    figures = Figures.of(item.text)
    memory = round(item.temporary_bytes / 2**20, 1)
    return {"kernels": figures.kernels, "moves": figures.moves, "memory_mib": memory, "calls": figures.calls}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
