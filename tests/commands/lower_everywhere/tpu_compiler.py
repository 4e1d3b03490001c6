"""Compiles cases with the compiler for TPUs on a machine without a TPU, in child processes, since it ends the process for some programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from commands.compiled_programs import processes, results
from commands.tpu_programs import libtpu
from support.paths import ROOT, TESTS

from .cases import Case
from .expected import ABORTS
from .trial import Outcome

FOLDER = ROOT / ".lower_everywhere"
TOPOLOGY = "v5e:2x2"
COMMAND = (sys.executable, "-m", "commands.lower_everywhere.tpu_child")

_CASES_PER_CHILD = 50


def results_file(folder: Path) -> Path:
    """Returns the file of results of the current sources and of the libtpu in a folder. It does not depend on the expected failures."""
    here = sorted(path for path in Path(__file__).parent.glob("*.py") if path.name not in ("expected.py", "__main__.py"))
    return FOLDER / f"libtpu-{libtpu.version(folder)}-{results.code(TESTS / 'cases' / 'conformance', *here)}.jsonl"


def compile_all(
    wanted: Sequence[Case], path: Path, folder: Path, command: Sequence[str] = COMMAND
) -> Iterator[tuple[Case, dict[str, Outcome]]]:
    """Yields the outcomes of cases by platform, including those of earlier runs. Each outcome is written to `path` at once.

    Args:
        folder: The folder with libtpu.

    Raises: LibtpuError.
    """
    settings = libtpu.environment(folder.absolute())
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.with_suffix(".log")
    # A child without cases only loads libtpu: a failure there is not the fault of a case.
    if status := processes.call([*command, str(path)], settings, log):
        raise libtpu.LibtpuError(f"libtpu does not load ({status}): {processes.last_words(log.read_text())}")
    # Models, which take minutes each, come last.
    ordered = sorted(wanted, key=lambda case: case.kind == "model")
    groups = {case: _group(case, position) for position, case in enumerate(ordered)}
    lines = processes.compile_all(ordered, groups.__getitem__, path, command, settings, log)
    for case in wanted:
        yield case, _outcomes(lines[str(case)])


def _group(case: Case, position: int) -> str:
    """Returns the name of a case's child. A child has one model, or many operators."""
    return str(case) if case.kind == "model" else f"operators from {position // _CASES_PER_CHILD * _CASES_PER_CHILD}"


def _outcomes(line: dict[str, Any]) -> dict[str, Outcome]:
    if "error" in line:
        return {"tpu": Outcome(ABORTS, line["error"])}
    return {platform: Outcome(item["kind"], item["text"], tuple(item["calls"])) for platform, item in line["outcomes"].items()}
