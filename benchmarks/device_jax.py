"""`python -m benchmarks device`: compares trace once, lazy mode and eager mode on the device "jax". Writes device.md and device.json."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dynaxla.bench import report
from dynaxla.bench.argument_checks import check_device, check_writable
from dynaxla.bench.benchmark_error import BenchmarkError
from dynaxla.bench.measure import BenchSettings, ModelResult, measure, process_settings, warm_up_engines
from dynaxla.bench.runner import ModelSetup
from dynaxla.bench.suites import BenchCase

from . import engines as engine_table
from . import suites, tables

INTRODUCTION = """\
# Trace once, lazy mode and eager mode on the device "jax"

Made by `python -m benchmarks device`. Batch 1, float32, one thread. *eager*: each op is a program of XLA. *lazy*: each call records its ops
and runs them as one program. *dynaxla*: traced once; *dynaxla_retrace*: traced at every call. *dynamo*: TorchDynamo around a graph that
runs in eager mode; *dynamo_aot*: TorchDynamo and AOTAutograd around such a graph. *..._native*: the same model and inputs as CPU tensors.

Engines take turns in one process; times are medians of calls, each with a wait for the device. *A / B* in a heading is A's time divided by
B's. If the CPU time is less than the wall time, the processor was shared: then compare CPU times. Each result was compared with eager mode
on the CPU; for training, the loss and all gradients.
"""

# The number of calls with one wait for the device, for the amortized time of a call.
SEVERAL = 10


@dataclass(frozen=True)
class Part:
    """One set of tables.

    Attributes:
        title: the set's title.
        engines: the engines that are compared.
        ratios: pairs of engines; the first one's time over the second's is shown.
        training: the name of an optimizer, or "" for inference.
    """

    title: str
    engines: tuple[str, ...]
    ratios: tuple[tuple[str, str], ...]
    training: str = ""


_TRAINING = ("eager", "lazy", "dynaxla", "dynaxla_step", "dynaxla_retrace", "eager_native", "dynaxla_native", "dynaxla_step_native")
_RATIOS = (("lazy", "dynaxla"), ("dynaxla_retrace", "dynaxla"), ("eager", "dynaxla"), ("dynaxla", "dynaxla_native"))
_STEP_RATIOS = (("lazy", "dynaxla_step"), ("dynaxla_step", "dynaxla_step_native"))

PARTS = {
    "inference": Part(
        "Inference",
        ("eager", "lazy", "dynamo", "dynamo_aot", "dynaxla", "dynaxla_retrace", "eager_native", "dynaxla_native"),
        _RATIOS,
    ),
    "forward-backward": Part("Forward and backward pass", _TRAINING, (*_RATIOS, *_STEP_RATIOS), "none"),
    "training-sgd": Part("Whole training steps with SGD", _TRAINING, (*_RATIOS, *_STEP_RATIOS), "sgd"),
}
_CAPTURE_ALONE = ("dynamo", "dynamo_aot")


def write(parts: Sequence[str], output: Path, models: Sequence[str], seconds: float, minutes: float, device: str) -> bool:
    """Measures the models that these parts (all, if none are named) still lack, and writes the tables after each model.

    No model is begun after this many minutes; a later call with the same output continues.

    Returns: True if everything has been measured, and no model failed or disagreed with eager mode.
    Raises: BenchmarkError.
    """
    unknown = [name for name in parts if name not in PARTS]
    if unknown:
        raise BenchmarkError(f"unknown part {', '.join(map(repr, unknown))}; the valid names are: {', '.join(PARTS)}")
    cases = {case.name: case for case in suites.choose("models", models)}
    where = check_device(device, 1)
    if where.type != "jax":
        raise BenchmarkError(f"these are tables of the device jax, not of {device!r}; for other devices use the commands cpu and gpu")
    check_writable(output)
    file = output / "device.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    wanted = [(part, model) for part in parts or PARTS for model in cases]
    lacking = [(part, model) for part, model in wanted if model not in found.get(part, {})]
    end = time.monotonic() + 60 * minutes
    rehearsed = set()
    with process_settings(1):
        for number, (part, model) in enumerate(lacking):
            if number and time.monotonic() > end:
                print(f"{len(lacking) - number} of {len(wanted)} are still to be measured: the same command goes on there.")
                return False
            print(f"{part}: {model}", flush=True)
            if part not in rehearsed:
                warm_up_engines(_engines(PARTS[part]), _setup(PARTS[part], where))
                rehearsed.add(part)
            measured = measure_model(PARTS[part], cases[model], where, seconds)
            found.setdefault(part, {})[model] = measured
            file.write_text(json.dumps(found, indent=1) + "\n")
            (output / "device.md").write_text(as_markdown(found))
    (output / "device.md").write_text(as_markdown(found))
    return all(row["good"] for part, model in wanted for row in found[part][model]["engines"].values())


def measure_model(part: Part, case: BenchCase, device: torch.device, seconds: float) -> dict[str, Any]:
    """Measures one model.

    Returns: `environment`; `captured`, the fields of capture.Capture (None in training); `engines`, see `_as_entries`.
    """
    settings = BenchSettings(_setup(part, device), seconds=seconds, amortized=0 if part.training else SEVERAL)
    result = measure(case, _engines(part), settings)
    captured = None if result.captured is None else asdict(result.captured)
    return {"environment": report.environment(), "captured": captured, "engines": _as_entries(result)}


def _engines(part: Part) -> list[engine_table.BenchEngine]:
    return engine_table.choose(part.engines, [], "jax")[0]


def _setup(part: Part, device: torch.device) -> ModelSetup:
    return ModelSetup(device=device, training=part.training)


def _as_entries(result: ModelResult) -> dict[str, Any]:
    """Returns a model's entry in device.json, by engine.

    An entry has `good`; `failure` if that is False; milliseconds of a call: the median `ms` with `lower` and `upper` quartiles, `cpu_ms`,
    `amortized_ms` (None if it was not measured), and means of its `phases`; `first_call` in seconds; `recorded_ops` in a call;
    `compilations` and `traces` in all timed calls; `error`.
    """
    entries: dict[str, Any] = {}
    for row in result.rows:
        entry: dict[str, Any] = {"good": row.agrees}
        if row.wall is not None and row.cpu is not None:
            entry |= {"ms": row.wall.median, "lower": row.wall.lower, "upper": row.wall.upper, "cpu_ms": row.cpu.median}
            entry |= {"amortized_ms": row.amortized and row.amortized.median, "first_call": row.first_call_seconds}
            entry |= {"phases": row.call_phases, "recorded_ops": row.recorded_ops, "compilations": row.compilations, "traces": row.traces}
        if row.agreement is not None:
            entry["error"] = min(row.agreement.error, 1e30)  # JSON has no infinity
        if not row.agrees:
            entry["failure"] = row.failure or "disagrees with eager"
        entries[row.engine] = entry
    return entries


def as_markdown(found: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [INTRODUCTION]
    for name, part in PARTS.items():
        models = found.get(name, {})
        if not models:
            continue
        engines = {model: measured["engines"] for model, measured in models.items()}
        lines += [f"## {part.title}", "", *tables.all_circumstances(models.values()), "", _conclusion(engines), ""]
        lines += [*tables.times(part.engines, part.ratios, engines), "", "CPU time:", ""]
        lines += [*tables.times(part.engines, part.ratios, _with_ms(engines, "cpu_ms")), ""]
        lines += ["Quartiles in ms, and seconds of first calls:", "", *_spreads(part, engines), ""]
        lines += ["Lazy mode's phases, mean milliseconds of a warm call:", "", *_lazy(engines), ""]
        if not part.training:
            lines += [
                "The cost of capture alone: the time of eager mode on the device divided by that of captured graphs that run in eager",
                f"mode, for one call, and for {SEVERAL} calls with one wait:",
                "",
                *_capture_alone(engines),
                "",
                "TorchDynamo's graphs:",
                "",
                *_captured(models),
                "",
            ]
    return "\n".join(lines)


def _conclusion(engines: Mapping[str, Mapping[str, Any]]) -> str:
    rows = [row for model in engines.values() for row in model.values()]
    bad = sum(not row["good"] for row in rows)
    return f"{bad} of {len(rows)} rows failed or disagree with eager." if bad else f"All {len(rows)} rows agree with the CPU's eager mode."


def _with_ms(engines: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    """Returns the same entries with another time as `ms`."""
    return {
        model: {engine: {**row, "ms": row[name]} if row["good"] else row for engine, row in rows.items()} for model, rows in engines.items()
    }


def _spreads(part: Part, engines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = tables.heading(["model", *part.engines])
    for model, rows in engines.items():
        cells = [
            f"{row['lower']:.3g}…{row['upper']:.3g}; {row['first_call']:.1f} s" if row["good"] else tables.absent(row)
            for row in (rows[name] for name in part.engines)
        ]
        lines.append(tables.line([model, *cells]))
    return lines


def _lazy(engines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = tables.heading(["model", *report.LAZY_HEADINGS])
    for model, rows in engines.items():
        row = rows["lazy"]
        if row["good"]:
            cells = report.lazy_cells(row["phases"], row["recorded_ops"], row["compilations"], row["ms"])
            lines.append(tables.line([model, *cells]))
    return lines


def _capture_alone(engines: Mapping[str, Mapping[str, Any]]) -> list[str]:
    kinds = [(name, time_of) for name in _CAPTURE_ALONE for time_of in ("ms", "amortized_ms")]
    lines = tables.heading(["model", *[name if time_of == "ms" else f"{name}, {SEVERAL} calls" for name, time_of in kinds]])
    collected: list[list[float]] = [[] for _ in kinds]
    for model, rows in engines.items():
        cells = [model]
        for values, (name, time_of) in zip(collected, kinds, strict=True):
            if rows[name]["good"] and rows["eager"]["good"]:
                values.append(rows["eager"][time_of] / rows[name][time_of])
                cells.append(f"{values[-1]:.3f}")
            else:
                cells.append("-")
        lines.append(tables.line(cells))
    means = [f"**{tables.mean(values):.3f}**" if values else "-" for values in collected]
    return [*lines, tables.line(["**geometric mean**", *means])]


def _captured(models: Mapping[str, Any]) -> list[str]:
    names = ["graphs", "graph calls", "ops per graph", "largest graph", "eager ops", "ops captured", "graph breaks"]
    lines = tables.heading(["model", *names])
    for model, measured in models.items():
        found = measured["captured"]
        if found is not None:
            counts = [found["graphs"], found["graph_calls"], f"{found['ops_per_graph']:.1f}", found["largest_graph"], found["eager_ops"]]
            share = f"{found['captured_share']:.1%}"
            lines.append(tables.line([model, *map(str, counts), share, str(sum(found["breaks"].values()))]))
    return lines
