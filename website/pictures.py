"""Pictures of the benchmarks' results: bars in plain SVG, generated from docs/benchmarks/*.json."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1] / "docs" / "benchmarks"
# The engines in the order of a picture, with colours that are visible on both backgrounds of the site. Eager mode is a line.
COLOURS = {
    "inductor": "#ef8a3c", "inductor_frozen": "#ef8a3c", "torchscript": "#b9a13a", "lazy": "#8e6bbf",
    "dynaxla_retrace": "#7fb0e6", "dynaxla": "#2f6fc4", "dynaxla_frozen": "#2f6fc4", "dynaxla_step": "#17427f",
}  # fmt: skip
# Parts of cpu.json whose engines are compared with eager mode.
CPU = {
    "batch1": "Batch 1, float32, one thread", "batch8": "Batch 8, float32, one thread", "frozen-batch1": "Frozen, batch 1, one thread",
    "frozen-batch8": "Frozen, batch 8, one thread", "bfloat16": "bfloat16, batch 8, one thread",
    "training-sgd": "A training step with SGD, batch 4, one thread", "training-adamw": "A training step with AdamW, batch 4, one thread",
    "small": "Small models, batch 1, one thread", "functions": "Functions over a transformer's activations, one thread",
}  # fmt: skip
ROW, GAP, LEFT, WIDTH, RIGHT = 11, 9, 190, 460, 60
TEXT = "#7a7a7a"


@dataclass(frozen=True)
class Picture:
    """A bar chart.

    Attributes:
        name: The name of the SVG file, without ".svg".
        title: The heading.
        groups: The values by engine, for each row.
        unit: The meaning of the values.
        measured: A sentence with the date, versions and machine of the measurements.
        table: The page with the values.
        summary: A sentence about the values.
    """

    name: str
    title: str
    groups: Mapping[str, Mapping[str, float]]
    unit: str
    measured: str
    table: str
    summary: str

    def svg(self) -> str:
        """Returns horizontal bars: a group for each row, with a bar for each engine."""
        highest = max(value for row in self.groups.values() for value in row.values())
        parts, y = [], 34
        for label, row in self.groups.items():
            middle = y + ROW * len(row) / 2 + 4
            parts.append(f'<text x="{LEFT - 8}" y="{middle:g}" text-anchor="end">{escape(label)}</text>')
            for engine, value in row.items():
                length = max(1.0, WIDTH * value / highest)
                parts.append(f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="{ROW - 1}" fill="{COLOURS[engine]}"/>')
                parts.append(f'<text x="{LEFT + length + 4:.1f}" y="{y + ROW - 2}" font-size="9">{value:.3g}</text>')
                y += ROW
            y += GAP
        eager_x = LEFT + WIDTH / highest  # eager mode's speed
        line = f'<line x1="{eager_x:.1f}" y1="28" x2="{eager_x:.1f}" y2="{y}" stroke="{TEXT}" stroke-dasharray="3 3"/>'
        engines = list(dict.fromkeys(engine for row in self.groups.values() for engine in row))
        legend = [
            f'<rect x="{LEFT + 130 * number}" y="8" width="10" height="10" fill="{COLOURS[engine]}"/>'
            f'<text x="{LEFT + 130 * number + 15}" y="17">{escape(engine)}</text>'
            for number, engine in enumerate(engines)
        ]
        body = "\n".join([f"<title>{escape(self.title)}: {escape(self.unit)}</title>", *legend, line, *parts])
        width = max(LEFT + WIDTH + RIGHT, LEFT + 130 * len(engines))
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 4}" width="{width}" height="{y + 4}" '
            f'font-family="sans-serif" font-size="12" fill="{TEXT}">\n{body}\n</svg>\n'
        )


def pictures() -> list[Picture]:
    """Returns all pictures. Raises: KeyError if a table no longer has a value that is shown."""
    return [_of_ten_models(), *_of_parts_on_the_cpu(), *_on_the_device(), *_of_single_ops()]


def page(folder: str) -> str:
    """Returns the Markdown page with all pictures. folder: the folder of the SVG files, seen from the page."""
    parts = [
        "# Benchmarks in pictures",
        "The speed of each engine relative to eager mode: longer is faster, and the dashed line is eager mode. "
        "[Measurements](README.md) has the commands, the machines, and the limits of the slow rows.",
    ]
    for picture in pictures():
        parts += [
            f"## {picture.title}",
            f"![{picture.title}: {picture.unit}]({folder}/{picture.name}.svg)",
            f"*{picture.unit}.* {picture.summary} {picture.measured} ([table]({picture.table}))",
        ]
    return "\n\n".join(parts) + "\n"


def _read(name: str) -> Any:
    return json.loads((BENCHMARKS / f"{name}.json").read_text())


def _measured(environment: Mapping[str, str]) -> str:
    return f"Measured {environment['date'][:10]} with torch {environment['torch']}, jax {environment['jax']}, on {environment['cpu']}."


def _in_order(row: Mapping[str, float]) -> dict[str, float]:
    return {engine: row[engine] for engine in COLOURS if engine in row}


def _of_ten_models() -> Picture:
    report = _read("models-cpu-batch1-float32")
    groups = {
        model["model"]: _in_order({row["engine"]: row["speedup"] for row in model["rows"] if not row["failure"]})
        for model in report["models"]
    }
    unit = "Times as fast as eager mode"
    return Picture(
        "ten-models",
        "Ten models, five engines",
        groups,
        unit,
        _measured(report["environment"]),
        "models-cpu-batch1-float32.md",
        _means(groups),
    )


def _of_parts_on_the_cpu() -> list[Picture]:
    parts = _read("cpu")
    drawn = []
    for part, title in CPU.items():
        groups = {model: _speedups(engines, "eager") for model, engines in parts[part]["models"].items()}
        measured = _measured(parts[part]["environment"])
        drawn.append(Picture(f"cpu-{part}", title, groups, "Times as fast as eager mode", measured, "cpu.md", _means(groups)))
    return drawn


def _on_the_device() -> list[Picture]:
    drawn = []
    for part, models in _read("device").items():
        groups = {model: _speedups(cell["engines"], "eager") for model, cell in models.items()}
        measured, unit = _measured(next(iter(models.values()))["environment"]), "Times as fast as eager mode on that device"
        drawn.append(Picture(f"device-{part}", f'The device "jax", {part}', groups, unit, measured, "device.md", _means(groups)))
    return drawn


def _speedups(engines: Mapping[str, Mapping[str, Any]], baseline: str) -> dict[str, float]:
    return _in_order({engine: engines[baseline]["ms"] / cell["ms"] for engine, cell in engines.items() if cell["good"]})


def _of_single_ops() -> list[Picture]:
    """Shows quantiles of the speeds, since several hundred names would not fit into a picture."""
    ops, drawn = _read("ops"), []
    for kind in ("forward", "gradient"):
        rows = [row for name, row in ops["rows"].items() if name.endswith(f", {kind}") and not row["failure"]]
        speedups = sorted(row["eager"] / max(row["dynaxla"] - row["empty"], row["eager"] / 100) for row in rows)
        quantiles = {percent: speedups[min(len(speedups) - 1, len(speedups) * percent // 100)] for percent in (5, 10, 25, 50, 75, 90, 95)}
        groups = {f"{percent}% are at most": {"dynaxla": speedup} for percent, speedup in quantiles.items()}
        title, summary = (
            f"Single ops, {kind}: {len(rows)} calls",
            f"Half of them are more than {quantiles[50]:.2f} times as fast as eager mode.",
        )
        unit = "Times as fast as eager mode, without the time of an empty compiled call"
        drawn.append(Picture(f"ops-{kind}", title, groups, unit, _measured(ops["environment"]), "ops.md", summary))
    return drawn


def _means(groups: Mapping[str, Mapping[str, float]]) -> str:
    engines = dict.fromkeys(engine for row in groups.values() for engine in row)
    means = {engine: _geometric_mean([row[engine] for row in groups.values() if engine in row]) for engine in engines}
    return "Geometric means: " + ", ".join(f"{engine} {mean:.2f}" for engine, mean in means.items()) + "."


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
