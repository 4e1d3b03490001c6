"""`python -m benchmarks cpu`: compares dynaxla with Inductor on the CPU, for claims of the documentation. Writes cpu.md and cpu.json."""

from __future__ import annotations

import contextlib
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dynaxla.bench import report
from dynaxla.bench.argument_checks import check_writable
from dynaxla.bench.benchmark_error import BenchmarkError
from dynaxla.bench.measure import BenchSettings
from dynaxla.bench.runner import ModelSetup
from dynaxla.bench.session import run
from dynaxla.bench.suites import BenchCase
from dynaxla.runtime import machine

from . import engines as engine_table
from . import generation, layers, lengths, single_ops, suites, tables, two_processes, versus_jax
from .cells import Cells
from .choices import FIRST_CALL, INTEROP, LAYERS, LENGTHS, MEMORY, OPS, PROCESSES, STARTS
from .first_call import PHASES, first_calls
from .peak_memory import step_memory
from .second_start import DECODER, ENGINES, start

PLAIN = ("eager", "inductor", "dynaxla")
FROZEN = ("eager", "inductor_frozen", "dynaxla_frozen")
TRAINING = ("eager", "inductor", "dynaxla", "dynaxla_separate", "dynaxla_step")
OTHERS = ("eager", "dynaxla", "dynaxla_step")
FUNCTIONS = ("eager", "inductor", "xla_vectors_256", "dynaxla")
XLA_OPTIONS = (*engine_table.XLA_OPTIONS, "dynaxla")
READING = "reading"
STEPS = ("layer", "decoder", "int8_decoder")
# Explanations of engines for the tables that have them.
LEGENDS = {
    "inductor_frozen": "Inductor with its setting `freezing`",
    "dynaxla_frozen": "dynaxla with its option `freeze`",
    "dynaxla_separate": "the forward pass, the backward pass and the optimizer are one program each",
    "dynaxla_step": "the whole training step is one program, by `dynaxla.compile_step`",
    "xla_vectors_128": "XLA uses vectors of 128 bits (dynaxla: 512 bits if the processor has them)",
    "xla_vectors_256": "XLA uses vectors of 256 bits (dynaxla: 512 bits if the processor has them)",
    "xla_old_emitters": "without XLA's fusion emitters",
    "xla_concurrent": "with the XLA scheduler that prefers concurrency to low memory",
    "xla_no_library": "XLA calls its library YNN for no op",
    "xla_reassociated": "XLA may reassociate floating-point arithmetic (its fast math, without ignoring NaNs and infinities)",
    READING: "the time for reading all weights and buffers once",
}


@dataclass(frozen=True)
class Part:
    """One table.

    Attributes:
        title: the table's title.
        suite: the suite of its cases.
        batch: the batch size.
        dtype: the dtype of models and inputs.
        threads: the number of threads.
        engines: the engines that are compared.
        calls: calls that are timed together.
        training: the name of an optimizer, or "" for inference.
        reads: True to show also the time for reading all weights and buffers once.
        cases: prefixes of names: of the suite, the cases whose names begin with one of the prefixes are measured.
    """

    title: str
    suite: str = "models"
    batch: int = 1
    dtype: torch.dtype = torch.float32
    threads: int = 1
    engines: tuple[str, ...] = PLAIN
    calls: int = 1
    training: str = ""
    reads: bool = False
    cases: tuple[str, ...] = ("",)

    def chosen(self, models: Sequence[str]) -> list[BenchCase]:
        """Returns the table's cases; only those that `models` names, if it names any. Raises: BenchmarkError."""
        return [case for case in suites.choose(self.suite, models) if case.name.startswith(self.cases)]

    @property
    def ratios(self) -> list[tuple[str, str]]:
        """Pairs of engines; the first one's time over the second's is shown.

        The second is the last engine: the variant of dynaxla that the table is about. In the table of `OTHERS`, eager mode is compared with
        both dynaxla engines.
        """
        if self.engines == OTHERS:
            return [("eager", name) for name in OTHERS[1:]]
        return [(name, self.engines[-1]) for name in (*self.engines[:-1], *([READING] if self.reads else []))]

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.engines, READING) if self.reads else self.engines


PARTS = {
    "batch1": Part("float32, batch 1, one thread"),
    "batch8": Part("float32, batch 8, one thread", batch=8),
    "batch1-threads2": Part("float32, batch 1, two threads", threads=2),
    "batch8-threads2": Part("float32, batch 8, two threads", batch=8, threads=2),
    "frozen-batch1": Part("Frozen, float32, batch 1, one thread", engines=FROZEN),
    "frozen-batch8": Part("Frozen, float32, batch 8, one thread", batch=8, engines=FROZEN),
    "bfloat16": Part("bfloat16, batch 8, one thread", batch=8, dtype=torch.bfloat16),
    "training-sgd": Part("Training with SGD, float32, batch 4, one thread", batch=4, engines=TRAINING, training="sgd"),
    "training-adamw": Part("Training with AdamW, float32, batch 4, one thread", batch=4, engines=TRAINING, training="adamw"),
    "training-others": Part(
        "Training of other models with SGD, float32, batch 4, one thread", suite="others", batch=4, engines=OTHERS, training="sgd"
    ),
    "small": Part("Small models, batch 1, one thread", suite="small", calls=100),
    "functions": Part("Functions, float32, batch 8, one thread", suite="functions", batch=8, engines=FUNCTIONS, calls=10),
    "generation": Part("Generation of one token, float32, one thread", suite="generation", reads=True, cases=STEPS),
    "generation-bfloat16": Part(
        "Generation of one token, bfloat16, one thread", suite="generation", dtype=torch.bfloat16, reads=True, cases=STEPS
    ),
    "generation-row": Part("A row written into a cache, float32, batch 1, one thread", suite="generation", cases=("row",)),
    "xla-options": Part("XLA's options, float32, batch 1, one thread", engines=XLA_OPTIONS),
    "xla-options-small": Part("XLA's options, small models, batch 1, one thread", suite="small", engines=XLA_OPTIONS, calls=100),
}
MEMORY_BATCH, MEMORY_OPTIMIZER = 4, "adamw"
SECOND_STARTS = 3
# Parts that take more than half an hour. An interrupted run of these parts can continue; see `Cells`.
LONG = (STARTS, LENGTHS, "training-others")
MEMORY_ENGINES = ("eager", "dynaxla", "dynaxla_step")


def write(parts: Sequence[str], output: Path, models: Sequence[str], seconds: float) -> bool:
    """Measures these parts (all, if none are named), and writes the tables.

    Returns: True if no model failed or disagreed with eager mode.
    Raises: BenchmarkError.
    """
    known = [*PARTS, FIRST_CALL, STARTS, LAYERS, MEMORY, LENGTHS, INTEROP, PROCESSES, OPS]
    unknown = [name for name in parts if name not in known]
    if unknown:
        raise BenchmarkError(f"unknown part {', '.join(map(repr, unknown))}; the valid names are: {', '.join(known)}")
    check_writable(output)
    good = True
    file = output / "cpu.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    for name in parts or known:
        if name == OPS:  # written to files of its own
            good = single_ops.write(output, models, seconds) and good
            continue
        if name == FIRST_CALL:
            found[name] = {"environment": report.environment(), **measure_first_calls(models)}
        elif name == STARTS:
            cells = _cells(name, output)
            found[name] = {"environment": report.environment(), "starts": measure_starts(models, cells)}
        elif name == LAYERS:
            found[name] = {"environment": report.environment(), "runs": layers.runs()}
        elif name == MEMORY:
            found[name] = {"environment": report.environment(), **measure_memory(models)}
        elif name == LENGTHS:
            cells = _cells(name, output)
            found[name] = {"environment": report.environment(), "runs": lengths.runs(models, cells)}
            good = good and not any(run["disagreement"] for engines in found[name]["runs"].values() for run in engines.values())
        elif name == PROCESSES:
            found[name] = {"environment": report.environment(), "runs": two_processes.runs()}
        elif name == INTEROP:
            found[name] = {"environment": report.environment(), "runs": versus_jax.runs(models, seconds)}
            good = good and versus_jax.is_good(found[name]["runs"])
        else:
            found[name] = _measured(name, models, seconds, output)
            good = good and all(entry["good"] for engines in found[name]["models"].values() for entry in engines.values())
            if PARTS[name].reads:
                for model, entry in found[name]["models"].items():
                    (case,) = PARTS[name].chosen([model])
                    entry[READING] = {"good": True, "ms": generation.reading_ms(case.build().to(PARTS[name].dtype))}
        file.write_text(json.dumps(found, indent=1) + "\n")
        (output / "cpu.md").write_text(as_markdown(found))
        if name in LONG:
            _cells(name, output).done()
    return good


def _cells(part: str, output: Path) -> Cells:
    """Returns the measurements that an interrupted run of this part has left in the output directory."""
    return Cells(output / f"unfinished-{part}.json", {**report.environment(), "sources": machine.sources() or ""})


def _measured(name: str, models: Sequence[str], seconds: float, output: Path) -> dict[str, Any]:
    """Measures a part, and returns its entry in cpu.json. In a long part, each model's measurements are kept as soon as they exist."""
    part = PARTS[name]

    def of(names: Sequence[str]) -> dict[str, Any]:
        found = as_part(measure_part(part, names, seconds))
        if name in LONG and not found["models"]:  # `run` catches Ctrl-C and returns a report without models
            raise KeyboardInterrupt
        return found

    if name not in LONG:
        return of(models)
    cells, found = _cells(name, output), dict[str, Any]()
    for case in part.chosen(models):
        found |= cells.measured(case.name, lambda model: of([model])["models"], case.name)
    return {"environment": report.environment(), "models": found}


def measure_part(part: Part, models: Sequence[str], seconds: float) -> report.BenchReport:
    chosen, _ = engine_table.choose(part.engines, [])
    setup = ModelSetup(part.batch, part.dtype, threads=part.threads, training=part.training)
    return run(part.chosen(models), chosen, BenchSettings(setup, iterations_per_run=part.calls, seconds=seconds), part.suite)


def as_part(result: report.BenchReport) -> dict[str, Any]:
    """Returns a report's entry in cpu.json: milliseconds with quartiles, or the failure, by model and engine."""
    models: dict[str, Any] = {}
    for row in result.rows:
        entry: dict[str, Any] = {"good": row.agrees}
        if row.wall is not None:
            entry |= {"ms": row.wall.median, "lower": row.wall.lower, "upper": row.wall.upper}
        if not row.agrees:
            entry["failure"] = row.failure or "disagrees with eager"
        models.setdefault(row.model, {})[row.engine] = entry
    return {"environment": result.environment, "models": models}


def measure_first_calls(models: Sequence[str]) -> dict[str, Any]:
    """Returns CPU seconds of first calls by engine and model.

    The engines are Inductor and dynaxla with empty caches, "dynaxla again" (another process with the caches that dynaxla has filled), and
    dynamo_aot (capture alone).
    """
    names = [case.name for case in suites.choose("models", models)]
    with tempfile.TemporaryDirectory() as bytecode:
        for engine in ("inductor", "dynaxla"):
            with tempfile.TemporaryDirectory() as cache:
                start(engine, names[0], cache, bytecode)  # writes each module's bytecode
        with tempfile.TemporaryDirectory() as cache:
            found = {again: first_calls("dynaxla", names, cache, bytecode) for again in ("dynaxla", "dynaxla again")}
        for engine in ("dynamo_aot", "inductor"):
            with tempfile.TemporaryDirectory() as cache:
                found[engine] = first_calls(engine, names, cache, bytecode)
    return {"seconds": found}


def measure_starts(models: Sequence[str], cells: Cells) -> dict[str, dict[str, list[float]]]:
    """Returns CPU seconds of the whole first call in a fresh process, by model and engine.

    The first value is with empty caches, the next `SECOND_STARTS` values with the caches that the first process has left. Engines take
    turns.
    """
    others = [model for model in models if model != DECODER]
    names = [case.name for case in suites.choose("models", others)] if others or not models else []
    names += [DECODER] if len(others) < len(models) or not models else []
    starts: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as bytecode:
        for name in names:
            starts[name] = cells.measured(name, _starts, name, bytecode)
    return starts


def _starts(model: str, bytecode: str) -> dict[str, list[float]]:
    """Returns the values of `measure_starts` for one model, by engine."""
    found: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    with contextlib.ExitStack() as stack:
        caches = {engine: stack.enter_context(tempfile.TemporaryDirectory()) for engine in ENGINES}
        if not (complete := Path(bytecode) / "complete").exists():  # first write each module's bytecode
            for engine in ENGINES:
                with tempfile.TemporaryDirectory() as cache:
                    start(engine, model, cache, bytecode)
            complete.touch()
        for _ in range(1 + SECOND_STARTS):
            for engine in ENGINES:
                found[engine].append(start(engine, model, caches[engine], bytecode))
    return found


def measure_memory(models: Sequence[str]) -> dict[str, Any]:
    """Returns bytes by model and engine: the peak of a step, and the size of the parameters with the optimizer's state."""
    names = [case.name for case in suites.choose("models", models)]
    return {
        "bytes": {name: {engine: step_memory(engine, name, MEMORY_BATCH, MEMORY_OPTIMIZER) for engine in MEMORY_ENGINES} for name in names}
    }


def as_markdown(found: dict[str, Any]) -> str:
    lines = [
        "# dynaxla compared with Inductor on the CPU",
        "",
        "Made by `python -m benchmarks cpu`. *A / B* in a heading is A's number divided by B's. In the tables of models and functions",
        "with times in milliseconds, engines take turns in one process, times are medians, and a ratio of more than 1 means that B is",
        "faster. Each other table has a description of its own.",
        "",
    ]
    for name, part in PARTS.items():
        if name in found:
            lines += [f"## {part.title}", "", tables.circumstances(found[name]["environment"]), ""]
            lines += [*_legend(part), *_table(part, found[name]["models"]), ""]
    if FIRST_CALL in found:
        lines += [
            "## First calls",
            "",
            tables.circumstances(found[FIRST_CALL]["environment"]),
            "",
            *_first_call_table(found[FIRST_CALL]["seconds"]),
            "",
        ]
    if STARTS in found:
        lines += ["## Starts", "", tables.circumstances(found[STARTS]["environment"]), "", *_starts_table(found[STARTS]["starts"]), ""]
    if LAYERS in found:
        lines += ["## Equal layers", "", tables.circumstances(found[LAYERS]["environment"]), "", *layers.table(found[LAYERS]["runs"]), ""]
    if MEMORY in found:
        title = f"Memory of a training step, {MEMORY_OPTIMIZER}, float32, batch {MEMORY_BATCH}, one thread"
        lines += [f"## {title}", "", tables.circumstances(found[MEMORY]["environment"]), "", *_memory_table(found[MEMORY]["bytes"]), ""]
    if LENGTHS in found:
        lines += ["## Many lengths, float32, batch 1, one thread", "", tables.circumstances(found[LENGTHS]["environment"]), ""]
        lines += [*lengths.table(found[LENGTHS]["runs"]), ""]
    if INTEROP in found:
        lines += ["## PyTorch in JAX, float32", "", tables.circumstances(found[INTEROP]["environment"]), ""]
        lines += [*versus_jax.table(found[INTEROP]["runs"]), ""]
    if PROCESSES in found:
        lines += ["## Two processes, float32, one thread each", "", tables.circumstances(found[PROCESSES]["environment"]), ""]
        lines += [*two_processes.table(found[PROCESSES]["runs"]), ""]
    return "\n".join(lines)


def _legend(part: Part) -> list[str]:
    """Returns a list of the engines of a table that need an explanation."""
    items = [f"- *{name}*: {LEGENDS[name]}" for name in part.columns if name in LEGENDS]
    if part.training:
        names = ", ".join(f"*{name}*" for name in part.columns if name in PLAIN)
        items.insert(0, f"- {names}: the model runs in eager mode or is compiled by this backend; the optimizer is torch's fused one")
    return [*items, ""] if items else []


def _table(part: Part, models: dict[str, Any]) -> list[str]:
    return tables.times(part.columns, part.ratios, models)


def _first_call_table(seconds: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Returns the table of first calls. Inductor's time after capture is that of its whole first call minus that of capture alone."""
    lines = [
        "CPU seconds of a first call, child processes included, with empty caches. *Compile*: the part of the call after the capture by",
        "TorchDynamo and AOTAutograd, that is lowering and compilation by XLA. For Inductor it is the time of the first call minus that",
        "of the engine `dynamo_aot`, which runs the captured graph in eager mode. *Again*: in a second process, with the cache directory",
        "that the first one has filled.",
        "",
    ]
    heading = ["model", "inductor", "dynaxla", "dynaxla / inductor", "inductor compile", "dynaxla compile"]
    heading += ["dynaxla compile / inductor compile", "dynaxla compile again", "dynaxla compile again / first"]
    lines += tables.heading(heading)
    totals = [0.0] * 5
    for model in seconds["dynaxla"]:
        whole = [seconds[engine][model]["cpu"] for engine in ("inductor", "dynaxla")]
        theirs = whole[0] - seconds["dynamo_aot"][model]["cpu"]
        mine, again = (sum(seconds[engine][model][phase] for phase in PHASES) for engine in ("dynaxla", "dynaxla again"))
        values = [*whole, theirs, mine, again]
        totals = [total + value for total, value in zip(totals, values, strict=True)]
        lines.append(tables.line([model, *_first_call_cells(values)]))
    lines.append(tables.line(["**all**", *_first_call_cells(totals)]))
    return lines


def _starts_table(starts: dict[str, dict[str, list[float]]]) -> list[str]:
    lines = [
        "CPU seconds of the whole first call in a fresh process, child processes included. Before the call, the process has imported",
        "torch, made the model, and called it in eager mode. Imports by torch.compile and by the engine are counted. *inductor*,",
        "*dynaxla*: with empty caches. *Again*: in further processes, with the caches that the first one has filled (the median of",
        f"{SECOND_STARTS}). *eager*: the backend `eager`, which is TorchDynamo alone. Bytecode of all Python modules exists before, as",
        "for installed packages.",
        "",
    ]
    heading = ["model", "inductor", "inductor again", "dynaxla", "dynaxla again", "eager again"]
    heading += ["dynaxla again / inductor again", "dynaxla again / dynaxla"]
    lines += tables.heading(heading)
    totals = [0.0] * 5
    for model, found in starts.items():
        first_and_again = [(first, statistics.median(again)) for first, *again in (found[engine] for engine in ENGINES)]
        values = [seconds for both in first_and_again[:-1] for seconds in both] + [first_and_again[-1][1]]
        totals = [total + value for total, value in zip(totals, values, strict=True)]
        lines.append(tables.line([model, *_starts_cells(values)]))
    return [*lines, tables.line(["**all**", *_starts_cells(totals)])]


def _starts_cells(values: Sequence[float]) -> list[str]:
    _, their_second, mine, my_second, _ = values
    return [*(f"{value:.2f}" for value in values), f"{my_second / their_second:.2f}", f"{my_second / mine:.2f}"]


def _first_call_cells(values: Sequence[float]) -> list[str]:
    theirs, mine, their_compile, my_compile, again = values
    shown = [f"{theirs:.2f}", f"{mine:.2f}", f"{mine / theirs:.3f}", f"{their_compile:.2f}", f"{my_compile:.3f}"]
    return [*shown, f"{my_compile / their_compile:.3f}", f"{again:.3f}", f"{again / my_compile:.2f}"]


def _memory_table(models: dict[str, dict[str, dict[str, int]]]) -> list[str]:
    lines = [
        "MB: the peak memory of a process during a warm step, minus its memory before the model was made. The code of libraries is not",
        "counted. Each engine runs in a process of its own. *State*: the size of the parameters and the optimizer's state. The last",
        "column is the sum of eager mode's peak and the state, minus the peak of *dynaxla_step* (`dynaxla.compile_step`). *dynaxla*: the",
        "model is compiled with dynaxla, and the optimizer is torch's fused one.",
        "",
    ]
    heading = ["model", "state", *MEMORY_ENGINES, "below eager + state"]
    lines += [tables.line(heading), tables.line(["---", *["---:"] * (len(heading) - 1)])]
    for model, engines in models.items():
        state, peaks = engines["eager"]["state"], {engine: found["peak"] for engine, found in engines.items()}
        values = [state, *peaks.values(), peaks["eager"] + state - peaks["dynaxla_step"]]
        lines.append(tables.line([model, *[f"{value / 1e6:.0f}" for value in values]]))
    return lines
