"""Reports of measurements: tables on the terminal, JSON, Markdown, and a plot."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .benchmark_error import BenchmarkError
from .measure import BenchSettings, ModelResult, Row, Spread

MEBIBYTE = 1 << 20
_PACKAGES = ("dynaxla", "torch", "jax", "jaxlib", "numpy", "torchvision", "timm", "transformers", "torchax", "torch_xla")


@dataclass
class BenchReport:
    """The results of a run for all models. `write` writes it, `show` prints it."""

    suite: str
    settings: BenchSettings
    engines: list[str]
    notes: list[str] = field(default_factory=list)
    models: list[ModelResult] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=lambda: environment())

    @property
    def subject(self) -> str:
        """A short description of the workload."""
        optimizer = self.settings.placement.training
        return f"{self.suite}, training with {optimizer}" if optimizer else self.suite

    @property
    def rows(self) -> list[Row]:
        return [row for model in self.models for row in model.rows]

    @property
    def bad_rows(self) -> list[Row]:
        """Rows that failed or disagree with eager."""
        return [row for row in self.rows if not row.good]

    def geometric_mean(self, engine: str, over: str, *, amortized: bool = False) -> tuple[float, int] | None:
        """Returns the geometric mean of the speedups of one engine over another, and the number of models in it.

        Models count if both engines succeed and agree with eager mode. Returns None if there are none.
        """
        ratios = [ratio for model in self.models if (ratio := ratio_of(model, engine, over, amortized=amortized)) is not None]
        return (math.exp(sum(map(math.log, ratios)) / len(ratios)), len(ratios)) if ratios else None


def ratio_of(model: ModelResult, engine: str, over: str, *, amortized: bool = False) -> float | None:
    """Returns the speedup of one engine over another, with `amortized` that of calls which share one synchronization; None if unknown."""
    rows = [next((row for row in model.rows if row.engine == name and row.good), None) for name in (engine, over)]
    mine, theirs = [None if row is None else row.amortized if amortized else row.wall for row in rows]
    return None if mine is None or theirs is None else theirs.median / mine.median


def environment() -> dict[str, str]:
    """Returns the date, versions of packages, and facts about the machine."""
    facts = {"date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"), "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            facts[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    facts["system"] = f"{platform.system()} {platform.machine()}"
    facts["cpu"] = f"{_cpu_model()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}"
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown"


# The columns of the table of measurements: a heading, and a function that formats a row's cell.
_COLUMNS: list[tuple[str, Callable[[Row], str]]] = [
    ("model", lambda row: row.model),
    ("engine", lambda row: row.engine),
    ("first call s", lambda row: _number(row.first_call_seconds, "{:.2f}")),
    ("median ms", lambda row: _median(row.wall, "{:.4g}")),
    ("quartiles ms", lambda row: f"{row.wall.lower:.4g} … {row.wall.upper:.4g}" if row.wall else "-"),
    ("CPU ms", lambda row: _median(row.cpu, "{:.4g}")),
    ("speedup", lambda row: _number(row.speedup, "{:.3f}")),
    ("agrees", lambda row: _agreement(row)),
    ("error", lambda row: f"{row.agreement.error:.1e}" if row.agreement else "-"),
]
_AMORTIZED_COLUMNS: list[tuple[str, Callable[[Row], str]]] = [
    ("median ms, amortized", lambda row: _median(row.amortized, "{:.4g}")),
]
_MEMORY_COLUMNS: list[tuple[str, Callable[[Row], str]]] = [
    ("peak MiB", lambda row: f"{row.memory.peak_bytes / MEBIBYTE:.0f}" if row.memory else "-"),
    ("kept MiB", lambda row: f"{row.memory.kept_bytes / MEBIBYTE:.0f}" if row.memory else "-"),
    ("GPU peak MiB", lambda row: f"{row.memory.device_peak_bytes / MEBIBYTE:.0f}" if row.memory and row.memory.device_peak_bytes else "-"),
]
_TEXTS = ("agrees", "graph breaks")


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _median(spread: Spread | None, form: str) -> str:
    return "-" if spread is None else form.format(spread.median)


def _agreement(row: Row) -> str:
    if row.failure:
        return f"failed: {row.failure}"
    if row.agreement is None:
        return "-"
    if row.agreement.agrees:
        return "yes"
    return f"NO: {row.agreement.detail or f'off by {row.agreement.error:.1e} of the largest value'}"


@dataclass(frozen=True)
class Grid:
    """A table before it is rendered. The first `left` columns are text, the others numbers."""

    title: str
    headings: list[str]
    lines: list[list[str]]
    left: int = 1


def grids(report: BenchReport) -> list[Grid]:
    """Returns the tables of a report, in order."""
    found = [
        _measurements(report), _speedups(report), _capture_alone(report), _first_phases(report), _call_phases(report), _lazy_phases(report),
        _captured(report),
    ]  # fmt: skip
    return [grid for grid in found if grid is not None and grid.lines]


def _measurements(report: BenchReport) -> Grid:
    columns = [
        *_COLUMNS, *(_AMORTIZED_COLUMNS if report.settings.amortized else []), *(_MEMORY_COLUMNS if report.settings.memory else []),
    ]  # fmt: skip
    lines = [[show(row) for _, show in columns] for row in report.rows]
    return Grid(f"Measurements (baseline: {report.settings.baseline})", [heading for heading, _ in columns], lines, 2)


def _speedups(report: BenchReport) -> Grid:
    lines = []
    for model in report.models:
        of = {row.engine: row for row in model.rows}
        lines.append([model.model, *[_number(of[name].speedup if of[name].good else None, "{:.3f}") for name in report.engines]])
    means = [report.geometric_mean(name, report.settings.baseline) for name in report.engines]
    lines.append(["geometric mean", *["-" if mean is None else f"{mean[0]:.3f}" for mean in means]])
    lines.append(["models in it", *["0" if mean is None else str(mean[1]) for mean in means]])
    return Grid(f"Speedup over {report.settings.baseline}", ["model", *report.engines], lines)


# Engines that run captured graphs in eager mode.
_CAPTURE_ALONE = ("dynamo", "dynamo_aot")


def _capture_alone(report: BenchReport) -> Grid | None:
    """Returns the table of the cost of capture alone, without an optimizing backend."""
    several = report.settings.amortized
    kinds = [(name, amortized) for name in _CAPTURE_ALONE if name in report.engines for amortized in (False, True)]
    if not several or not kinds or "eager" not in report.engines:
        return None
    lines = []
    for model in report.models:
        ratios = [ratio_of(model, name, "eager", amortized=amortized) for name, amortized in kinds]
        lines.append([model.model, *[_number(ratio, "{:.3f}") for ratio in ratios]])
    means = [report.geometric_mean(name, "eager", amortized=amortized) for name, amortized in kinds]
    lines.append(["geometric mean", *["-" if mean is None else f"{mean[0]:.3f}" for mean in means]])
    headings = [f"{name}, {several} calls for a wait" if amortized else name for name, amortized in kinds]
    return Grid("Capture without a backend that optimizes: speed, eager mode's is 1", ["model", *headings], lines)


def _first_phases(report: BenchReport) -> Grid:
    names = ("capture", "trace", "lower", "compile")
    lines = []
    for row in report.rows:
        if row.first_phases and row.first_call_seconds is not None:
            seconds = [row.first_phases.get(name, 0.0) for name in names]
            rest = row.first_call_seconds - sum(seconds)
            lines.append([row.model, row.engine, *[f"{value:.3f}" for value in (*seconds, rest, row.first_call_seconds)]])
    headings = ["model", "engine", "AOTAutograd", "trace", "lower", "XLA compile", "TorchDynamo and first run", "first call"]
    return Grid("The first call's phases, seconds", headings, lines, 2)


def _call_phases(report: BenchReport) -> Grid:
    names = ("trace", "lower", "lookup", "run", "execute")
    lines = []
    for model in report.models:
        once = next((row for row in model.rows if row.engine == "dynaxla" and row.good), None)
        beside = ["-"] * 2 if once is None else [_median(once.wall, "{:.3f}"), str(once.traces)]
        for row in model.rows:
            if row.call_phases.keys() - {"execute"} and row.wall is not None and row.engine != "lazy":
                phases = [f"{row.call_phases.get(name, 0.0):.3f}" for name in names]
                ratio = row.wall.median / once.wall.median if once is not None and once.wall is not None else None
                lines.append([row.model, row.engine, *phases, _median(row.wall, "{:.3f}"), *beside, _number(ratio, "{:.3f}")])
    headings = ["model", "engine", *names, "whole call (median)", "dynaxla (median)", "its traces", "dynaxla is faster by"]
    return Grid("Phases of a later call, mean milliseconds, beside dynaxla's whole call", headings, lines, 2)


def _lazy_phases(report: BenchReport) -> Grid | None:
    """Returns the table of the phases of a later call in lazy mode: recording, finding the program, running it, waiting for it."""
    lines = []
    for model in report.models:
        row = next((row for row in model.rows if row.engine == "lazy" and row.good), None)
        if row is not None and row.wall is not None:
            lines.append([model.model, *lazy_cells(row.call_phases, row.recorded_ops, row.compilations, row.wall.median)])
    return Grid("Lazy mode: phases of a later call, mean milliseconds", ["model", *LAZY_HEADINGS], lines) if lines else None


LAZY_HEADINGS = ("ops", "recording", "µs for an op", "lookup", "execute", "wait", "whole call (median)", "programs compiled")


def lazy_cells(phases: Mapping[str, float], ops: float, compilations: int, milliseconds: float) -> list[str]:
    """Returns the cells for `LAZY_HEADINGS`.

    Args:
        phases: milliseconds of `record` (Python's part of the call), `lookup` (of the program, by the recorded ops), `execute` (until XLA
            has accepted or finished the program), `wait` (until everything is finished).
        ops: recorded ops in a call.
        compilations: programs compiled in all timed calls.
        milliseconds: the median of the whole call.
    """
    shown = [phases.get(name, 0.0) for name in ("record", "lookup", "execute", "wait")]
    recording, *others = [f"{value:.3f}" for value in shown]
    each = f"{shown[0] / ops * 1e3:.1f}" if ops else "-"
    return [f"{ops:.0f}", recording, each, *others, f"{milliseconds:.3f}", str(compilations)]


def _captured(report: BenchReport) -> Grid:
    lines = []
    for model in report.models:
        found = model.captured
        if found is None:
            if model.capture_failure:
                lines.append([model.model, *["-"] * 6, f"failed: {model.capture_failure}"])
            continue
        reasons = "; ".join(found.breaks) or "none"
        counts = [found.graphs, found.graph_calls, f"{found.ops_per_graph:.1f}", found.largest_graph, found.eager_ops]
        lines.append([model.model, *map(str, counts), f"{found.captured_share:.1%}", reasons])
    headings = ["model", "graphs", "graph calls", "ops per graph", "largest graph", "eager ops", "ops captured", "graph breaks"]
    return Grid("What TorchDynamo captures (ATen ops, graph calls in one call of the model)", headings, lines)


def conclusions(report: BenchReport) -> list[str]:
    """Returns sentences that summarize the tables."""
    found = []
    mean = report.geometric_mean("dynaxla", "dynaxla_retrace")
    if mean is not None:
        found.append(f"Trace once over trace at every call: {mean[0]:.3f} times as fast (geometric mean of {mean[1]} models).")
    mean = report.geometric_mean("dynaxla", "lazy")
    if mean is not None:
        found.append(f"Trace once over lazy mode: {mean[0]:.3f} times as fast (geometric mean of {mean[1]} models).")
    if report.bad_rows:
        found.append(f"{len(report.bad_rows)} of {len(report.rows)} rows failed or disagree with eager.")
    elif report.rows:
        found.append(f"All {len(report.rows)} rows agree with eager.")
    return found


def describe(report: BenchReport) -> list[str]:
    """Returns lines about the versions, the machine and the settings."""
    settings, placement = report.settings, report.settings.placement
    rounds = f"{settings.rounds} rounds" if settings.rounds else f"about {settings.seconds:g} s of rounds for each engine"
    versions = ", ".join(f"{name} {report.environment[name]}" for name in ("python", *_PACKAGES) if name in report.environment)
    dtype = str(placement.dtype).removeprefix("torch.")
    inputs = "fresh random input at each call" if settings.randomize_input else "the same input at each call"
    return [
        f"{report.environment['date']}; {versions}.",
        "; ".join(report.environment[name] for name in ("system", "cpu", "gpu") if name in report.environment) + ".",
        f"Suite {report.subject}, batch {placement.batch}, {dtype}, {placement.device}, {placement.threads} thread(s), "
        f"seed {placement.seed}; {rounds}, {settings.iterations_per_run} call(s) in a measurement, {inputs}.",
        *report.notes,
    ]


def show(report: BenchReport, console: Console) -> None:
    for grid in grids(report):
        table = Table(title=grid.title, title_justify="left", header_style="bold")
        for number, heading in enumerate(grid.headings):
            table.add_column(heading, justify="left" if number < grid.left or heading in _TEXTS else "right", overflow="fold")
        previous = None
        for line in grid.lines:
            repeated = grid.left == 2 and line[0] == previous
            if grid.left == 2 and previous is not None and not repeated:
                table.add_section()
            style = "red" if any(cell.startswith(("failed", "NO")) for cell in line) else ""
            # Text, not str: rich would parse brackets in messages as markup.
            table.add_row(*[Text(cell) for cell in (["", *line[1:]] if repeated else line)], style=style)
            previous = line[0]
        console.print(table)
    for sentence in describe(report):
        console.print(Text(sentence), style="dim")
    for sentence in conclusions(report):
        console.print(Text(sentence), style="bold red" if report.bad_rows else "bold")


def write(report: BenchReport, directory: Path) -> list[Path]:
    """Writes NAME.json (everything, with each sample), NAME.md and NAME.png, and returns these files.

    NAME has the suite, the optimizer, the device, the batch size and the dtype, so that several runs can share a directory.

    Raises: BenchmarkError if the directory cannot be written.
    """
    placement = report.settings.placement
    subject = report.suite + (f"-training-{placement.training}" if placement.training else "")
    name = f"{subject}-{placement.device.type}-batch{placement.batch}-{str(placement.dtype).removeprefix('torch.')}"
    files = [directory / f"{name}.{kind}" for kind in ("json", "md", "png")]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files[0].write_text(json.dumps(as_json(report), indent=1) + "\n")
        files[1].write_text(as_markdown(report, files[2].name))
        plot(report, files[2])
    except OSError as error:
        raise BenchmarkError(f"cannot write the report to {directory}: {error}") from error
    return files


def as_json(report: BenchReport) -> dict[str, Any]:
    means = {name: report.geometric_mean(name, report.settings.baseline) for name in report.engines}
    return {
        "suite": report.suite,
        "environment": report.environment,
        "settings": _plain(report.settings),
        "engines": report.engines,
        "notes": report.notes,
        "geometric_means": {name: {"speedup": mean[0], "models": mean[1]} for name, mean in means.items() if mean is not None},
        "conclusions": conclusions(report),
        "models": [
            {
                "model": model.model,
                "captured": _plain(model.captured),
                "capture_failure": model.capture_failure,
                "rows": [{**_plain(row), "good": row.good} for row in model.rows],
            }
            for model in report.models
        ],
    }


def _plain(value: Any) -> Any:
    """Returns a value in terms of JSON's types. Infinities become text, which JSON does not have as numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def as_markdown(report: BenchReport, plot_name: str = "") -> str:
    device = str(report.settings.placement.device)
    lines = [f"# dynaxla bench: {report.subject} on {device}", "", *[f"- {line}" for line in describe(report)], ""]
    lines += [f"**{line}**\n" for line in conclusions(report)]
    if plot_name:
        lines += [f"![speedups]({plot_name})", ""]
    for grid in grids(report):
        lines += [f"## {grid.title}", "", _markdown_line(grid.headings)]
        left = [number < grid.left or heading in _TEXTS for number, heading in enumerate(grid.headings)]
        lines.append(_markdown_line("---" if is_left else "---:" for is_left in left))
        lines += [_markdown_line(line) for line in grid.lines]
        lines.append("")
    return "\n".join(lines)


def _markdown_line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def plot(report: BenchReport, path: Path) -> None:
    """Writes a bar plot of speedups: a group for each model, and one for the geometric means. Raises: BenchmarkError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import FuncFormatter
    except ImportError as error:
        raise BenchmarkError("the plot needs matplotlib, which is not installed: pip install 'dynaxla[bench]'") from error
    groups = [*[model.model for model in report.models], "geometric mean"]
    figure = Figure(figsize=(max(6.0, 1.6 * len(groups)), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    width = 0.8 / max(1, len(report.engines))
    for number, name in enumerate(report.engines):
        heights = _heights(report, name)
        places = [place + (number - (len(report.engines) - 1) / 2) * width for place in range(len(groups))]
        # Bars go up from 1 if faster, down if slower: on a logarithmic scale, twice and half as fast are equally far from 1.
        axes.bar(places, [height - 1 if height else 0.0 for height in heights], width, bottom=1.0, label=name)
        for place, height in zip(places, heights, strict=True):
            if not height:
                axes.annotate("x", (place, 1.0), ha="center", va="center", color="red")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
    axes.set_ylabel(f"speedup over {report.settings.baseline}")
    axes.set_title(f"{report.subject}, batch {report.settings.placement.batch}, {report.settings.placement.device}; x: failed")
    figure.legend(loc="outside upper center", ncols=len(report.engines), fontsize="small")
    figure.savefig(path, dpi=120)


def _heights(report: BenchReport, engine: str) -> Sequence[float]:
    rows = [next(row for row in model.rows if row.engine == engine) for model in report.models]
    mean = report.geometric_mean(engine, report.settings.baseline)
    return [*[(row.speedup or 0.0) if row.good else 0.0 for row in rows], mean[0] if mean is not None else 0.0]
