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
from .measure import BenchSettings, EngineResult, ModelResult, Spread

MEBIBYTE = 1 << 20
_PACKAGES = ("dynaxla", "torch", "jax", "jaxlib", "numpy", "torchvision", "timm", "transformers", "torchax", "torch_xla")


@dataclass
class BenchReport:
    """The results of a run for all models. `write` writes the report to files, `show` prints it."""

    suite: str
    settings: BenchSettings
    engines: list[str]
    notes: list[str] = field(default_factory=list)
    models: list[ModelResult] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=lambda: environment())

    @property
    def subject(self) -> str:
        """A short description of the workload."""
        optimizer = self.settings.setup.training
        return f"{self.suite}, training with {optimizer}" if optimizer else self.suite

    @property
    def rows(self) -> list[EngineResult]:
        return [row for model in self.models for row in model.rows]

    @property
    def bad_rows(self) -> list[EngineResult]:
        """Rows that failed or disagree with eager."""
        return [row for row in self.rows if not row.agrees]

    def geometric_mean(self, engine: str, over: str, *, amortized: bool = False) -> tuple[float, int] | None:
        """Returns the geometric mean of the speedups of one engine over another, and the number of models in it.

        Models count if both engines succeed and agree with eager mode. Returns None if no model counts.
        """
        ratios = [ratio for model in self.models if (ratio := ratio_of(model, engine, over, amortized=amortized)) is not None]
        return (math.exp(sum(map(math.log, ratios)) / len(ratios)), len(ratios)) if ratios else None


def ratio_of(model: ModelResult, engine: str, over: str, *, amortized: bool = False) -> float | None:
    """Returns the speedup of one engine over another; None unless both are good and timed. `amortized`: see `BenchSettings.amortized`."""
    rows = [next((row for row in model.rows if row.engine == name and row.agrees), None) for name in (engine, over)]
    time, other_time = [None if row is None else row.amortized if amortized else row.wall for row in rows]
    return None if time is None or other_time is None else other_time.median / time.median


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
_COLUMNS: list[tuple[str, Callable[[EngineResult], str]]] = [
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
_AMORTIZED_COLUMNS: list[tuple[str, Callable[[EngineResult], str]]] = [
    ("median ms, amortized", lambda row: _median(row.amortized, "{:.4g}")),
]
_MEMORY_COLUMNS: list[tuple[str, Callable[[EngineResult], str]]] = [
    ("peak MiB", lambda row: f"{row.memory.peak_bytes / MEBIBYTE:.0f}" if row.memory else "-"),
    ("kept MiB", lambda row: f"{row.memory.kept_bytes / MEBIBYTE:.0f}" if row.memory else "-"),
    ("GPU peak MiB", lambda row: f"{row.memory.device_peak_bytes / MEBIBYTE:.0f}" if row.memory and row.memory.device_peak_bytes else "-"),
]
# The headings of further columns with text, which is aligned to the left.
_TEXTS = ("agrees", "graph breaks")


def _number(value: float | None, template: str) -> str:
    return "-" if value is None else template.format(value)


def _median(spread: Spread | None, template: str) -> str:
    return "-" if spread is None else template.format(spread.median)


def _agreement(row: EngineResult) -> str:
    if row.failure:
        return f"failed: {row.failure}"
    if row.agreement is None:
        return "-"
    if row.agreement.agrees:
        return "yes"
    return f"NO: {row.agreement.detail or f'off by {row.agreement.error:.1e} of the largest value'}"


@dataclass(frozen=True)
class ReportTable:
    """A table before it is rendered.

    Attributes:
        title: the title.
        headings: the heading of each column.
        lines: the cells of each row.
        left: the number of columns with text. They come first, and numbers follow.
    """

    title: str
    headings: list[str]
    lines: list[list[str]]
    left: int = 1


def tables(report: BenchReport) -> list[ReportTable]:
    """Returns the tables of a report, in order."""
    result = [
        _measurements(report), _speedups(report), _capture_alone(report), _first_phases(report), _call_phases(report), _lazy_phases(report),
        _captured(report),
    ]  # fmt: skip
    return [table for table in result if table is not None and table.lines]


def _measurements(report: BenchReport) -> ReportTable:
    columns = [
        *_COLUMNS, *(_AMORTIZED_COLUMNS if report.settings.amortized else []), *(_MEMORY_COLUMNS if report.settings.memory else []),
    ]  # fmt: skip
    lines = [[show(row) for _, show in columns] for row in report.rows]
    return ReportTable(f"Measurements (baseline: {report.settings.baseline})", [heading for heading, _ in columns], lines, 2)


def _speedups(report: BenchReport) -> ReportTable:
    lines = []
    for model in report.models:
        rows_by_engine = {row.engine: row for row in model.rows}
        lines.append(
            [
                model.model,
                *[_number(rows_by_engine[name].speedup if rows_by_engine[name].agrees else None, "{:.3f}") for name in report.engines],
            ]
        )
    means = [report.geometric_mean(name, report.settings.baseline) for name in report.engines]
    lines.append(["geometric mean", *["-" if mean is None else f"{mean[0]:.3f}" for mean in means]])
    lines.append(["models in it", *["0" if mean is None else str(mean[1]) for mean in means]])
    return ReportTable(f"Speedup over {report.settings.baseline}", ["model", *report.engines], lines)


# Engines that capture graphs and run them in eager mode.
_CAPTURE_ALONE = ("dynamo", "dynamo_aot")


def _capture_alone(report: BenchReport) -> ReportTable | None:
    """Returns the table of the cost of capture alone, without an optimizing backend."""
    amortized_calls = report.settings.amortized
    kinds = [(name, amortized) for name in _CAPTURE_ALONE if name in report.engines for amortized in (False, True)]
    if not amortized_calls or not kinds or "eager" not in report.engines:
        return None
    lines = []
    for model in report.models:
        ratios = [ratio_of(model, name, "eager", amortized=amortized) for name, amortized in kinds]
        lines.append([model.model, *[_number(ratio, "{:.3f}") for ratio in ratios]])
    means = [report.geometric_mean(name, "eager", amortized=amortized) for name, amortized in kinds]
    lines.append(["geometric mean", *["-" if mean is None else f"{mean[0]:.3f}" for mean in means]])
    headings = [f"{name}, {amortized_calls} calls per wait" if amortized else name for name, amortized in kinds]
    return ReportTable("Capture without a backend that optimizes: speed, eager mode's is 1", ["model", *headings], lines)


def _first_phases(report: BenchReport) -> ReportTable:
    names = ("capture", "trace", "lower", "compile")
    lines = []
    for row in report.rows:
        if row.first_phases and row.first_call_seconds is not None:
            seconds = [row.first_phases.get(name, 0.0) for name in names]
            rest = row.first_call_seconds - sum(seconds)
            lines.append([row.model, row.engine, *[f"{value:.3f}" for value in (*seconds, rest, row.first_call_seconds)]])
    headings = ["model", "engine", "AOTAutograd", "trace", "lower", "XLA compile", "TorchDynamo and first run", "first call"]
    return ReportTable("The first call's phases, seconds", headings, lines, 2)


def _call_phases(report: BenchReport) -> ReportTable:
    names = ("trace", "lower", "lookup", "run", "execute")
    lines = []
    for model in report.models:
        dynaxla_row = next((row for row in model.rows if row.engine == "dynaxla" and row.agrees), None)
        dynaxla_cells = ["-"] * 2 if dynaxla_row is None else [_median(dynaxla_row.wall, "{:.3f}"), str(dynaxla_row.traces)]
        for row in model.rows:
            if row.call_phases.keys() - {"execute"} and row.wall is not None and row.engine != "lazy":
                phases = [f"{row.call_phases.get(name, 0.0):.3f}" for name in names]
                ratio = row.wall.median / dynaxla_row.wall.median if dynaxla_row is not None and dynaxla_row.wall is not None else None
                lines.append([row.model, row.engine, *phases, _median(row.wall, "{:.3f}"), *dynaxla_cells, _number(ratio, "{:.3f}")])
    headings = ["model", "engine", *names, "whole call (median)", "dynaxla (median)", "dynaxla's traces", "dynaxla is faster by"]
    return ReportTable("Phases of a later call, mean milliseconds, next to dynaxla's whole call", headings, lines, 2)


def _lazy_phases(report: BenchReport) -> ReportTable | None:
    """Returns the table of the phases of a later call in lazy mode: recording, look-up of the program, execution, wait."""
    lines = []
    for model in report.models:
        row = next((row for row in model.rows if row.engine == "lazy" and row.agrees), None)
        if row is not None and row.wall is not None:
            lines.append([model.model, *lazy_cells(row.call_phases, row.recorded_ops, row.compilations, row.wall.median)])
    return ReportTable("Lazy mode: phases of a later call, mean milliseconds", ["model", *LAZY_HEADINGS], lines) if lines else None


LAZY_HEADINGS = ("ops", "recording", "µs for an op", "lookup", "execute", "wait", "whole call (median)", "programs compiled")


def lazy_cells(phases: Mapping[str, float], ops: float, compilations: int, milliseconds: float) -> list[str]:
    """Returns the cells for `LAZY_HEADINGS`.

    Args:
        phases: milliseconds of `record` (Python's part of the call), `lookup` (of the program, by the recorded ops), `execute` (until XLA
            has accepted or finished the program), and `wait` (until all programs are finished).
        ops: the mean number of recorded ops in a call.
        compilations: the number of programs that were compiled in all timed calls together.
        milliseconds: the median of the whole call.
    """
    shown = [phases.get(name, 0.0) for name in ("record", "lookup", "execute", "wait")]
    recording, *others = [f"{value:.3f}" for value in shown]
    per_op = f"{shown[0] / ops * 1e3:.1f}" if ops else "-"
    return [f"{ops:.0f}", recording, per_op, *others, f"{milliseconds:.3f}", str(compilations)]


def _captured(report: BenchReport) -> ReportTable:
    lines = []
    for model in report.models:
        result = model.captured
        if result is None:
            if model.capture_failure:
                lines.append([model.model, *["-"] * 6, f"failed: {model.capture_failure}"])
            continue
        reasons = "; ".join(result.breaks) or "none"
        counts = [result.graphs, result.graph_calls, f"{result.ops_per_graph:.1f}", result.largest_graph, result.eager_ops]
        lines.append([model.model, *map(str, counts), f"{result.captured_share:.1%}", reasons])
    headings = ["model", "graphs", "graph calls", "ops per graph", "largest graph", "eager ops", "ops captured", "graph breaks"]
    return ReportTable("TorchDynamo's graphs (ATen ops, graph calls in one call of the model)", headings, lines)


def conclusions(report: BenchReport) -> list[str]:
    """Returns sentences that summarize the tables."""
    result = []
    mean = report.geometric_mean("dynaxla", "dynaxla_retrace")
    if mean is not None:
        result.append(f"Trace once over trace at every call: {mean[0]:.3f} times as fast (geometric mean of {mean[1]} models).")
    mean = report.geometric_mean("dynaxla", "lazy")
    if mean is not None:
        result.append(f"Trace once over lazy mode: {mean[0]:.3f} times as fast (geometric mean of {mean[1]} models).")
    if report.bad_rows:
        result.append(f"{len(report.bad_rows)} of {len(report.rows)} rows failed or disagree with eager.")
    elif report.rows:
        result.append(f"All {len(report.rows)} rows agree with eager.")
    return result


def describe(report: BenchReport) -> list[str]:
    """Returns lines about the versions, the machine and the settings."""
    settings, setup = report.settings, report.settings.setup
    rounds = f"{settings.rounds} rounds" if settings.rounds else f"about {settings.seconds:g} s of rounds for each engine"
    versions = ", ".join(f"{name} {report.environment[name]}" for name in ("python", *_PACKAGES) if name in report.environment)
    dtype = str(setup.dtype).removeprefix("torch.")
    inputs = "fresh random input at each call" if settings.randomize_input else "the same input at each call"
    return [
        f"{report.environment['date']}; {versions}.",
        "; ".join(report.environment[name] for name in ("system", "cpu", "gpu") if name in report.environment) + ".",
        f"Suite {report.subject}, batch {setup.batch}, {dtype}, {setup.device}, {setup.threads} thread(s), "
        f"seed {setup.seed}; {rounds}, {settings.iterations_per_run} call(s) in a measurement, {inputs}.",
        *report.notes,
    ]


def show(report: BenchReport, console: Console) -> None:
    for table in tables(report):
        rich_table = Table(title=table.title, title_justify="left", header_style="bold")
        for number, heading in enumerate(table.headings):
            rich_table.add_column(heading, justify="left" if number < table.left or heading in _TEXTS else "right", overflow="fold")
        previous = None
        for line in table.lines:
            repeated = table.left == 2 and line[0] == previous
            if table.left == 2 and previous is not None and not repeated:
                rich_table.add_section()
            style = "red" if any(cell.startswith(("failed", "NO")) for cell in line) else ""
            # Text, not str: rich would parse brackets in messages as markup.
            rich_table.add_row(*[Text(cell) for cell in (["", *line[1:]] if repeated else line)], style=style)
            previous = line[0]
        console.print(rich_table)
    for sentence in describe(report):
        console.print(Text(sentence), style="dim")
    for sentence in conclusions(report):
        console.print(Text(sentence), style="bold red" if report.bad_rows else "bold")


def write(report: BenchReport, directory: Path) -> list[Path]:
    """Writes NAME.json (all results, with each sample), NAME.md and NAME.png, and returns these files.

    NAME consists of the suite, the optimizer, the device, the batch size and the dtype, so that several runs can share a directory.

    Raises: BenchmarkError if the directory cannot be written.
    """
    setup = report.settings.setup
    subject = report.suite + (f"-training-{setup.training}" if setup.training else "")
    name = f"{subject}-{setup.device.type}-batch{setup.batch}-{str(setup.dtype).removeprefix('torch.')}"
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
                "rows": [{**_plain(row), "good": row.agrees} for row in model.rows],
            }
            for model in report.models
        ],
    }


def _plain(value: Any) -> Any:
    """Returns a value as JSON's types. Infinities and NaN become text, because JSON has no such numbers."""
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
    device = str(report.settings.setup.device)
    lines = [f"# dynaxla bench: {report.subject} on {device}", "", *[f"- {line}" for line in describe(report)], ""]
    lines += [f"**{line}**\n" for line in conclusions(report)]
    if plot_name:
        lines += [f"![Speed of each engine relative to the baseline]({plot_name})", ""]
    for table in tables(report):
        lines += [f"## {table.title}", "", _markdown_line(table.headings)]
        left = [number < table.left or heading in _TEXTS for number, heading in enumerate(table.headings)]
        lines.append(_markdown_line("---" if is_left else "---:" for is_left in left))
        lines += [_markdown_line(line) for line in table.lines]
        lines.append("")
    return "\n".join(lines)


def _markdown_line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def plot(report: BenchReport, path: Path) -> None:
    """Writes a bar plot of speedups: a group for each model, and a group for the geometric means.

    Raises: BenchmarkError without matplotlib.
    """
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
        positions = [position + (number - (len(report.engines) - 1) / 2) * width for position in range(len(groups))]
        # Bars go up from 1 if faster, down if slower: on a logarithmic scale, twice and half as fast are equally far from 1.
        axes.bar(positions, [height - 1 if height else 0.0 for height in heights], width, bottom=1.0, label=name)
        for position, height in zip(positions, heights, strict=True):
            if not height:
                axes.annotate("x", (position, 1.0), ha="center", va="center", color="red")
    axes.axhline(1.0, color="black", linewidth=0.8)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xticks(range(len(groups)), groups, rotation=30, ha="right")
    axes.set_ylabel(f"speedup over {report.settings.baseline}")
    title = f"{report.subject}: batch {report.settings.setup.batch}, {report.settings.setup.device}"
    axes.set_title(f"{title} (x: failed or wrong)" if report.bad_rows else title)
    figure.legend(loc="outside upper center", ncols=len(report.engines), fontsize="small")
    figure.savefig(path, dpi=120)


def _heights(report: BenchReport, engine: str) -> Sequence[float]:
    rows = [next(row for row in model.rows if row.engine == engine) for model in report.models]
    mean = report.geometric_mean(engine, report.settings.baseline)
    return [*[(row.speedup or 0.0) if row.agrees else 0.0 for row in rows], mean[0] if mean is not None else 0.0]
