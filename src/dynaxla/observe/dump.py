"""Writes the three stages of each compiled graph to files, and logs them to the logger `dynaxla` (`TORCH_LOGS="+dynaxla"`).

The stages are the ATen graph, the StableHLO program, and XLA's optimized HLO. The files have the full text of each stage. The log is
for people: it omits the tables of files, functions and stack frames before an HLO module (which are longer than the module), the metadata
of each instruction, and the bytes of large constants.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import jax
import torch

log = logging.getLogger("dynaxla")


def prepare(directory: str | os.PathLike[str]) -> Path:
    """Creates the directory, checks that files can be written there, and returns its path. Raises: OSError if they cannot."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path):
        return path


def graph_text(module: torch.fx.GraphModule) -> str:
    """Returns the graph as Python code, with shapes, dtypes, strides and devices."""
    return module.print_readable(print_output=False, include_stride=True, include_device=True)


def record(
    name: str, module: torch.fx.GraphModule, lowered: jax.stages.Lowered, optimized: Callable[[], str], directory: Path | None
) -> None:
    """Logs the stages of a compiled graph at level DEBUG, and writes them to NAME.aten.txt, NAME.stablehlo.mlir and NAME.hlo.txt.

    Args:
        name: the graph's name.
        module: the ATen graph.
        lowered: the program before XLA's optimizations, as StableHLO.
        optimized: returns the HLO text of the program after XLA's optimizations.
        directory: the directory of the files; None to write no files.
    """
    if directory is None and not log.isEnabledFor(logging.DEBUG):
        return
    texts = {"aten.txt": graph_text(module), "stablehlo.mlir": lowered.as_text(), "hlo.txt": optimized()}
    for kind, text in texts.items():
        log.debug("%s.%s\n%s", name, kind, readable(text))
        if directory is not None:
            (directory / f"{name}.{kind}").write_text(text)


# The tables before an HLO module. Each table ends at the next empty line.
_TABLES = re.compile(r"^(?:FileNames|FunctionNames|FileLocations|StackFrames)\n(?:.+\n)*\n*", re.MULTILINE)
_METADATA = re.compile(r', metadata=\{(?:"(?:[^"\\]|\\.)*"|[^"{}])*\}')
_LARGE_CONSTANT = re.compile(r'(dense<"0x[0-9A-F]{32})[0-9A-F]{64,}(?=">)')


def readable(text: str) -> str:
    """Returns StableHLO or HLO text without tables, metadata and the bytes of large constants."""
    return _LARGE_CONSTANT.sub(r"\1...", _METADATA.sub("", _TABLES.sub("", text)))
