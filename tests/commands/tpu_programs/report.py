"""The page docs/benchmarks/tpu-programs.md."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from commands.compiled_programs.results import Results

from . import libtpu
from .programs import CHIP

PAGE = Path("docs/benchmarks/tpu-programs.md")

_HEAD = """# XLA's programs for models on a TPU

Written by `make tpu-programs`: torch {torch}, jax {jax}, libtpu {libtpu}, compiled for one chip of {chip}, or for the 256 chips of
v5e:16x16, on a machine without a TPU. Nothing was run, so there are no times. Figures are of one chip. *JAX* is the same computation
written plainly in JAX (`tests/commands/tpu_programs/plain_jax.py`), with JAX's own flash attention where dynaxla uses a kernel.

- *cycles*: the compiler's estimate in thousands. A loop counts as often as the largest constant of its condition says. Kernels written in
  Pallas and communication do not count.
- *memory*: MiB of temporary memory. *arguments*: MiB of inputs and weights.
- *GB*: 10^9 bytes read and written, as XLA estimates.
- *instructions*: those of the entry computation that do work. *copies*: the copies in main memory among them.
- *float32 products*: the products and convolutions of two float32 operands.
- *calls*: custom calls, such as kernels written in Pallas (`tpu_custom_call`), and collectives with the MiB of their results.
- *seconds*: CPU seconds for capture and compilation of all programs of the cell.
"""
_COLUMNS = (
    "| | program | cycles | memory | arguments | GB | instructions | copies | float32 products | calls | seconds |\n"
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- | ---: |"
)


def page(results_by_cell: Results, folder: Path) -> str:
    """Returns the page: a table for each group."""
    head = _HEAD.format(torch=version("torch"), jax=version("jax"), libtpu=libtpu.version(folder), chip=CHIP)
    parts = [head]
    group = ""
    for name, result in results_by_cell.items():
        cell_group, _, cell = name.partition(": ")
        if cell_group != group:
            group = cell_group
            parts.append(f"\n## {group}\n\n{_COLUMNS}\n")
        parts += [f"{row}\n" for row in _rows(cell, result)]
    return "".join(parts)


def _rows(name: str, result: dict[str, Any]) -> Iterator[str]:
    if "error" in result:
        yield f"| {name} | | | | | | | | | failed: {result['error'].strip().splitlines()[-1][:160]} | |"
        return
    for index, (kind, figures) in enumerate(result["programs"].items()):
        calls = [f"{count} `{call}`" for call, count in figures["calls"].items()]
        calls += [f"{count} {kind} ({size / 2**20:.1f})" for kind, (count, size) in sorted(figures.get("collectives", {}).items())]
        cells = [
            name if index == 0 else "",
            kind,
            f"{figures['cycles'] / 1000:,.0f}",
            f"{figures['memory_mib']:.1f}",
            f"{figures['argument_mib']:.1f}",
            f"{figures['gigabytes']:.2f}",
            *(str(figures[count]) for count in ("instructions", "copies", "float32_products")),
            ", ".join(calls),
            f"{result['seconds']:.0f}" if index == 0 else "",
        ]
        yield f"| {' | '.join(cells)} |"
