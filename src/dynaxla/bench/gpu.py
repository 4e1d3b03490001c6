"""`dynaxla bench-gpu`: dynaxla beside Inductor on a GPU, in time, memory and first calls. It writes gpu.md and gpu.json, model by model."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import suites, tables
from .benchmark_error import BenchmarkError
from .gpu_model import measure_model
from .gpu_parts import PARTS, Part
from .requests import check_device, check_writable

INTRODUCTION = """\
# dynaxla beside Inductor on a GPU

Made by `dynaxla bench-gpu`. Ratios are the other engine's time over dynaxla's: more than 1 means that dynaxla is faster. Engines take turns
in one process; times are medians of ten calls after one another and one wait for the GPU. First calls are seconds of the clock, caches
empty. *Peak*: MB of the GPU's memory during warm calls, each engine in a process of its own, with the model: the most that torch's
allocator had given out and the most that JAX's had, added up; what CUDA and its libraries keep for themselves is in none. TF32 is torch's
setting. *inductor_autotuned*: Inductor with `mode="max-autotune"`, which also uses CUDA graphs.
"""


def write(parts: Sequence[str], output: Path, models: Sequence[str], seconds: float, minutes: float, device: str) -> bool:
    """Measure what these parts (all, if none are named) lack for about so many minutes, and write the tables after each model.

    Whether all that was asked for is there, and no model failed or disagreed with eager. Raises: BenchmarkError.
    """
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        raise BenchmarkError(f"no part {', '.join(map(repr, unknown))}; there are: {', '.join(PARTS)}")
    cases = suites.choose("models", models)
    check_device(device)
    check_writable(output)
    file = output / "gpu.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    wanted = [(name, case.name) for name in parts or PARTS for case in cases]
    lacking = [(part, model) for part, model in wanted if model not in found.get(part, {})]

    def keep(part: str, model: str, measured: dict[str, Any]) -> None:
        found.setdefault(part, {})[model] = measured
        file.write_text(json.dumps(found, indent=1) + "\n")
        (output / "gpu.md").write_text(as_markdown(found))

    left = _within(minutes, lacking, lambda part, model, end: measure_model(part, model, device, seconds, end), keep)
    if left:
        print(f"{left} of {len(wanted)} are still to be measured: the same command goes on there.")
    measured = [row for part, model in wanted for row in found.get(part, {}).get(model, {}).get("engines", {}).values()]
    return not left and all(row["good"] for row in measured)


def _within(
    minutes: float,
    lacking: Sequence[tuple[str, str]],
    measure: Callable[[str, str, float], dict[str, Any] | None],
    keep: Callable[[str, str, dict[str, Any]], None],
) -> int:
    """How many are left. What had all of the time and was not done with it is kept as a failure: the next call goes on behind it."""
    end = time.monotonic() + 60 * minutes
    for number, (part, model) in enumerate(lacking):
        print(f"{part}: {model}", flush=True)
        measured = measure(part, model, end)
        if measured is None and number:
            return len(lacking) - number
        if measured is None:
            failure = {"good": False, "failure": f"not done in {minutes:g} minutes"}
            keep(part, model, {"environment": {}, "engines": dict.fromkeys(PARTS[part].engines, failure)})
            return len(lacking) - 1
        keep(part, model, measured)
    return 0


def as_markdown(found: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [INTRODUCTION]
    for name, part in PARTS.items():
        if name in found:
            engines = {model: measured["engines"] for model, measured in found[name].items()}
            lines += [f"## {part.title}", "", *tables.all_circumstances(found[name].values()), ""]
            lines += [*tables.times(part.engines, part.ratios, engines), ""]
            lines += [*_first_calls_and_peaks(part, engines), ""]
    return "\n".join(lines)


def _first_calls_and_peaks(part: Part, models: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = tables.heading(["model", *[f"{name} first call s" for name in part.engines], *[f"{name} peak MB" for name in part.engines]])
    for model, rows in models.items():
        cells = [model]
        for what, shown in (("first_call", lambda value: f"{value:.1f}"), ("peak", lambda value: f"{value / 1e6:.0f}")):
            values = [rows.get(name, {}).get(what) for name in part.engines]
            cells += ["-" if value is None else shown(value) for value in values]
        lines.append(tables.line(cells))
    return lines
