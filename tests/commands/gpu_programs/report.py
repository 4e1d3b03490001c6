"""The page docs/benchmarks/gpu-programs.md."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from commands.compiled_programs.results import Results

from .models import BATCH, Cell
from .target import NAME

# The kinds of programs, in the order of the report.
KINDS = ("inference", "frozen", "forward", "backward")
PAGE = Path("docs/benchmarks/gpu-programs.md")

_HEAD = """# XLA's programs for models on a GPU

Written by `make gpu-programs`: torch {torch}, jax {jax}, XLA's CUDA plugin, compiled for an {gpu} on a machine without one (see
`tests/commands/gpu_programs/`). Nothing was run, so there are no times. XLA could not measure its alternatives: on a GPU it may choose
other tiles, and other kernels for matrix products.

Batch {batch}. `bert_base` has 128 tokens. `bert_base_1024` has 1024 tokens and no dropout in attention, which cuDNN's kernels do not
support; `bert_base_1024_dropout` has it. `gpt_block_1024` is one block of GPT-2 with 1024 tokens.

- *kernels*: the fusions, library calls and copies that one call launches. *moves*: the kernels that only copy, transpose or cast.
- *memory*: MiB of temporary memory, without inputs and results.
- *frozen*: inference with the option `freeze`, without the computations that depend only on parameters.
"""
_COLUMNS = "| | program | kernels | moves | memory | custom calls |\n| --- | --- | ---: | ---: | ---: | --- |"


def page(results_by_cell: Results) -> str:
    """Returns the page, with a table for each model."""
    parts = [_HEAD.format(torch=version("torch"), jax=version("jax"), gpu=NAME, batch=BATCH)]
    model = ""
    for name, result in results_by_cell.items():
        cell = Cell(*name.split(" "))
        if cell.model != model:
            model = cell.model
            parts.append(f"\n## {model}\n\n{_COLUMNS}\n")
        parts += [f"{row}\n" for row in _rows(" ".join((cell.dtype, cell.layout)).strip(), result)]
    return "".join(parts)


def _rows(name: str, result: dict) -> Iterator[str]:
    if "error" in result:
        yield f"| {name} | | | | | failed: {_reason(result['error'])} |"
        return
    for kind in KINDS:
        if kind in result["programs"]:
            figures = result["programs"][kind]
            calls = ", ".join(f"{count} `{call}`" for call, count in figures["calls"].items())
            yield f"| {name} | {kind} | {figures['kernels']} | {figures['moves']} | {figures['memory_mib']:.1f} | {calls} |"


def _reason(trace: str) -> str:
    """Returns the first line of a traceback's first exception. XLA's errors may name there the operation that could not be compiled."""
    named = [line for line in trace.splitlines() if line and not line.startswith((" ", "Traceback"))]
    return named[0][:160].replace("|", "\\|")
