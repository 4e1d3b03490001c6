"""Charts of the communication and the memory of programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError

if TYPE_CHECKING:
    from .traffic import CollectiveTraffic, DeviceMemory

# The largest number of rows in a chart. The largest items are shown.
_MAX_ROWS = 24
_COLORS = {
    "all-reduce": "#4269d0", "all-gather": "#efb118", "reduce-scatter": "#3ca951", "all-to-all": "#ff725c", "collective-permute": "#a463f2",
}  # fmt: skip
_OTHER = "#9498a0"
_MEMORY = {"arguments": "#486078", "results": "#8fa9bf", "temporary": "#d6dde4"}
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def draw(path: str | Path, collectives: Sequence[CollectiveTraffic], memory: Sequence[DeviceMemory]) -> None:
    """Draws the content of a report to a file: see `Report.picture`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as error:
        raise ArgumentError("a picture needs matplotlib, which is not installed", hint="pip install 'dynaxla[bench]'") from error
    by_bytes = sorted(collectives, key=lambda item: -item.bytes)
    by_total = sorted(memory, key=lambda item: -item.total)
    rows = max(1, min(len(by_bytes), _MAX_ROWS)), max(1, min(len(by_total), _MAX_ROWS))
    figure = Figure(figsize=(11, 2.2 + 0.42 * sum(rows)), layout=ConstrainedLayoutEngine(h_pad=0.12))
    canvas = FigureCanvasAgg(figure)
    if Path(path).suffix.removeprefix(".") not in canvas.get_supported_filetypes():
        endings = ", ".join(sorted(canvas.get_supported_filetypes()))
        raise ArgumentError(f"matplotlib does not know the file format of {str(path)!r}", hint=f"use one of the endings {endings}")
    above, below = figure.subplots(2, 1, height_ratios=[rows[0] + 1, rows[1] + 1])
    _draw_collectives(above, by_bytes)
    _draw_memory(below, by_total)
    figure.savefig(str(path), dpi=150)


def _draw_collectives(axes: Any, collectives: Sequence[CollectiveTraffic]) -> None:
    """Draws a bar for the bytes of each entry, labeled with the first of its user lines. `collectives` is sorted by bytes, descending."""
    shown = collectives[:_MAX_ROWS]
    names = [f"{item.program}\n{item.count} over {item.axes}" for item in shown]
    for row, item in enumerate(shown):
        axes.barh(row, item.bytes, color=_COLORS.get(item.kind, _OTHER), height=0.7)
        lines = f"{item.lines[0]}{f' and {len(item.lines) - 1} more' if len(item.lines) > 1 else ''}" if item.lines else "line not known"
        axes.annotate(
            f"{_format_bytes(item.bytes)}  {lines}", (item.bytes, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    _label(axes, names, "Bytes moved, on each device", len(collectives) - len(shown), max((item.bytes for item in shown), default=1))
    _legend(axes, {kind: _COLORS.get(kind, _OTHER) for kind in sorted({item.kind for item in shown})})


def _draw_memory(axes: Any, memory: Sequence[DeviceMemory]) -> None:
    """Draws a bar for the memory of each program, divided into arguments, results and temporary buffers. `memory` is sorted, descending."""
    shown = memory[:_MAX_ROWS]
    for row, item in enumerate(shown):
        start = 0
        for part, color in _MEMORY.items():
            axes.barh(row, getattr(item, part), left=start, color=color, height=0.7)
            start += getattr(item, part)
        runs = f"  {item.runs} runs" if item.runs > 1 else ""
        axes.annotate(f"{_format_bytes(start)}{runs}", (start, row), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8)
    names = [item.program for item in shown]
    _label(
        axes, names, "Bytes that a program needs, on each device", len(memory) - len(shown), max((item.total for item in shown), default=1)
    )
    _legend(axes, _MEMORY)


def _label(axes: Any, names: Sequence[str], title: str, left_out: int, longest: int) -> None:
    """Labels one chart.

    Args:
        axes: The chart's matplotlib axes.
        names: The rows' names.
        title: The chart's title.
        left_out: The number of rows that are not shown.
        longest: The length of the longest bar, in bytes.
    """
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(max(len(names), 2) - 0.5, -0.5)
    axes.set_xlim(0, 1.45 * max(longest, 1))
    axes.set_xticks(_ticks(max(longest, 1)))
    axes.xaxis.set_major_formatter(lambda value, _: _format_bytes(value))
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(title if not left_out else f"{title} ({left_out} smaller ones are left out)", loc="left", fontsize=10)
    if not names:
        axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", fontsize=9)


def _legend(axes: Any, colors: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    if colors:
        patches = [Patch(color=color, label=name) for name, color in colors.items()]
        axes.legend(handles=patches, loc="lower right", fontsize=8, frameon=False)


def _ticks(longest: int) -> list[float]:
    """Returns tick positions from zero to `longest` bytes, in round steps of a unit."""
    size = next(size for _, size in _UNITS if longest >= size)
    step = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if longest / size / step <= 6)
    return [size * step * index for index in range(int(longest / size / step) + 1)]


def _format_bytes(count: float) -> str:
    """Returns a number of bytes as text, with a unit."""
    unit, size = next(((unit, size) for unit, size in _UNITS if count >= size), _UNITS[-1])
    return f"{count / size:.3g} {unit}"
