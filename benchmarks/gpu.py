"""`python -m benchmarks gpu`: compares dynaxla with Inductor on a GPU: time, memory and first calls. Writes gpu.md and gpu.json."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from dynaxla.bench.argument_checks import check_device, check_writable
from dynaxla.bench.benchmark_error import BenchmarkError

from . import suites, tables
from .gpu_model import INTERVAL, Turn, measure_memory, measure_times
from .gpu_parts import FIRST, PARTS, Part

INTRODUCTION = """\
# dynaxla compared with Inductor on a GPU

Made by `python -m benchmarks gpu`. A ratio is the other engine's time divided by dynaxla's: more than 1 means that dynaxla is faster.
Engines take turns in one process; times are medians of ten consecutive calls with one wait for the GPU. First calls are in seconds of wall
time, with empty caches, while other rows compile, too (`--jobs`). *Peak*: MB of GPU memory during warm calls, including the model, with
each engine in a process of its own. It is the sum of the peaks of torch's and JAX's allocators, without the memory of CUDA and its
libraries. TF32 is torch's setting. *inductor_autotuned*: Inductor with `mode="max-autotune"`, which also uses CUDA graphs. *jax*: the model
as a JAX function under `jax.jit`. *xla_fewer_roundings*: XLA may omit roundings to half types. *xla_small_graphs*: convolutions are not in
CUDA graphs.
"""


def write(parts: Sequence[str], output: Path, models: Sequence[str], seconds: float, minutes: float, device: str, jobs: int) -> bool:
    """Measures the rows that these parts (all, if none are named) lack, for about `minutes`, and writes the tables after each step.

    The most requested rows come first, and all times come before any memory. A later call with the same output continues. `jobs` rows
    compile at once, and are timed one after the other.

    Returns: True if every row has been measured, and no engine failed or disagreed with eager mode.
    Raises: BenchmarkError.
    """
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        raise BenchmarkError(f"unknown part {', '.join(map(repr, unknown))}; the valid names are: {', '.join(PARTS)}")
    cases = suites.choose("gpu", models)
    check_device(device)
    check_writable(output)
    file = output / "gpu.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    wanted = sorted(((name, case.name) for name in parts or PARTS for case in cases), key=_rank)
    end = time.monotonic() + 60 * minutes

    def save() -> None:
        file.write_text(json.dumps(found, indent=1) + "\n")
        (output / "gpu.md").write_text(as_markdown(found))

    with tempfile.TemporaryDirectory() as caches:
        left = _measure_times(found, wanted, Path(caches), device, seconds, minutes, end, save, jobs)
        left += _measure_memory(found, wanted, Path(caches), device, seconds, end, save)
    if left:
        print(f"{left} measurements are left: the same command continues.")
    measured = [row for part, model in wanted for row in found.get(part, {}).get(model, {}).get("engines", {}).values()]
    return not left and all(row["good"] for row in measured)


def _rank(wanted: tuple[str, str]) -> int:
    """Returns the position of a part and model in FIRST, as a sort key. All other parts and models come after FIRST."""
    return FIRST.index(wanted) if wanted in FIRST else len(FIRST)


def _measure_times(
    found: dict[str, Any], wanted: Sequence[tuple[str, str]], caches: Path, device: str, seconds: float, minutes: float, end: float,
    save: Callable[[], None], jobs: int,
) -> int:  # fmt: skip
    """Measures times, and returns the number of models that are left.

    If the first model does not finish within all of the time, it is recorded as a failure, so that the next call continues after it.
    """
    lacking = [(part, model) for part, model in wanted if model not in found.get(part, {})]
    done = 0
    for start in range(0, len(lacking), jobs):
        group = lacking[start : start + jobs]
        for part, model in group:
            print(f"{part}: {model}", flush=True)
        before = done
        for part, model, measured in _side_by_side(group, caches, device, seconds, end):
            found.setdefault(part, {})[model] = measured
            done += 1
            save()
        if not done and not start:
            part, model = group[0]
            failure = {"good": False, "failure": f"not done in {minutes:g} minutes"}
            measured = {"environment": {}, "engines": dict.fromkeys(PARTS[part].engines, failure)}
            found.setdefault(part, {})[model] = measured
            done += 1
            save()
        if done - before < len(group):
            break  # the time is up
    return len(lacking) - done


# Seconds that a row takes after its engines have been timed: their results are compared once more.
_AFTER_ROUNDS = 3.0


def _side_by_side(
    group: Sequence[tuple[str, str]], caches: Path, device: str, seconds: float, end: float
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yields part, model and measurements of the rows that finish in time. All compile at once; then each is timed while no other runs."""
    turns = {row: Turn(caches.joinpath("turns", *row)) for row in group}
    latest = end - sum(seconds * len(PARTS[part].engines) + _AFTER_ROUNDS for part, _ in group)
    with ThreadPoolExecutor(len(group)) as pool:
        rows = {pool.submit(measure_times, *row, device, seconds, end, caches.joinpath(*row), turn): row for row, turn in turns.items()}
        pending = set(rows)
        try:
            while pending:
                compiling = [row for future, row in rows.items() if future in pending and not turns[row].is_ready]
                if compiling and time.monotonic() > latest and len(compiling) < len(pending):
                    for row in compiling:
                        turns[row].stop()
                elif not compiling:
                    turns[next(row for future, row in rows.items() if future in pending)].give()
                ended, pending = wait(pending, timeout=INTERVAL, return_when=FIRST_COMPLETED)
                for future in ended:
                    measured = future.result()
                    if measured is not None:
                        yield *rows[future], measured
        finally:
            for turn in turns.values():
                turn.stop()


def _measure_memory(
    found: dict[str, Any], wanted: Sequence[tuple[str, str]], caches: Path, device: str, seconds: float, end: float,
    save: Callable[[], None],
) -> int:  # fmt: skip
    """Measures memory, and returns the number of engines that are left."""
    lacking = [
        (part, model, engine)
        for part, model in wanted
        for engine, row in found.get(part, {}).get(model, {}).get("engines", {}).items()
        if row["good"] and "peak" not in row
    ]
    for number, (part, model, engine) in enumerate(lacking):
        answer = measure_memory(part, model, engine, device, seconds, end, caches / part / model)
        if answer is None:
            return len(lacking) - number
        found[part][model]["engines"][engine]["peak"] = answer.get("peak")
        save()
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
