"""Formats an explanation as one HTML page with its styles and charts. The page loads no other files and has no scripts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence

from . import formatting
from .explanation import CapturedGraph, Explanation, Graph, Line

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1c2430; --dim: #5b6675; --rule: #d9dee5; --soft: #f4f6f9; --mark: #2563a8;
  --warm: #b4540a }
@media (prefers-color-scheme: dark) { :root { --paper: #14181f; --ink: #e4e8ee; --dim: #98a3b3; --rule: #303845; --soft: #1d232d;
  --mark: #7cb3f0; --warm: #f0a35e } }
* { box-sizing: border-box }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; border-bottom: 1px solid var(--rule) }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem } p { margin: .3rem 0 } a { color: var(--mark) }
.dim { color: var(--dim) } .failed { color: var(--warm); font-weight: 600 }
code, .source { font: 13px/1.45 ui-monospace, "DejaVu Sans Mono", monospace; overflow-wrap: anywhere }
.source { display: block; background: var(--soft); padding: .2rem .5rem; border-left: 3px solid var(--mark); white-space: pre-wrap }
nav { display: flex; flex-wrap: wrap; column-gap: 1rem } nav a { white-space: nowrap }
.wide { overflow-x: auto } table { border-collapse: collapse; margin: .4rem 0; font-size: 14px }
th, td { text-align: left; vertical-align: top; padding: .2rem .9rem .2rem 0; border-bottom: 1px solid var(--rule);
  overflow-wrap: anywhere }
th { color: var(--dim); font-weight: 500 } td.n { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
.summary { display: grid; grid-template-columns: repeat(auto-fill, minmax(11rem, 1fr)); gap: .6rem; margin: 1rem 0; padding: 0 }
.summary div { background: var(--soft); padding: .5rem .7rem } .summary dt { color: var(--dim); font-size: 13px }
.summary dd { margin: 0; font-size: 1.05rem; font-weight: 600 }
ol.advice > li { margin: .5rem 0 } details { border: 1px solid var(--rule); margin: .6rem 0; padding: .4rem .8rem }
summary { cursor: pointer; font-weight: 600 } svg { max-width: 100%; height: auto; display: block }
svg text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink) } svg .bar { fill: var(--mark) }
svg .rail { fill: var(--soft) }
@media print { :root { color-scheme: light; --paper: #fff; --ink: #000; --dim: #444; --rule: #bbb; --soft: #f2f2f2; --mark: #1a4d8a }
  body { max-width: none; padding: 0; font-size: 11px } nav { display: none } details { break-inside: avoid } .wide { overflow: visible }
  details::details-content { content-visibility: visible; height: auto } }
"""
_WIDTH, _ROW, _NAMES, _VALUES = 760, 24, 230, 90


def page(explanation: Explanation) -> str:
    """Returns the HTML of the whole page."""
    title = _text(f"dynaxla explains {explanation.name}")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="icon" href="data:,"><title>{title}</title><style>{_STYLE}</style></head>\n<body>\n'
        f"<header><h1>{title}</h1>{_paragraph(explanation.versions, 'dim')}</header>\n{''.join(_sections(explanation))}</body></html>\n"
    )


def iframe(explanation: Explanation) -> str:
    """Returns the HTML of an iframe with the page."""
    source = html.escape(page(explanation), quote=True)
    return f'<iframe srcdoc="{source}" style="width: 100%; height: 40rem; border: 1px solid #8884" title="dynaxla.explain"></iframe>'


def _sections(explanation: Explanation) -> Iterable[str]:
    parts = [
        ("next", "What to do next", _advice(explanation)),
        ("lines", f"The costliest lines, of {'all runs' if explanation.is_script else 'a later call'}", _lines(explanation)),
        ("breaks", "Breaks", "".join(_break(explanation))),
        ("again", "Captured again", _recompilations(explanation)),
        ("phases", f"Phases of {'the script' if explanation.is_script else 'the first call'}", _phases(explanation)),
        ("graphs", "Graphs", "".join(map(_captured, explanation.captured))),
        ("notes", "Steps and notes", "".join(_paragraph(note) for note in (*explanation.step_modes, *explanation.notes))),
    ]
    shown = [(name, title, body) for name, title, body in parts if body]
    if explanation.error:
        yield _paragraph(f"It failed: {explanation.error}", "failed")
    yield "<nav>" + "".join(f'<a href="#{name}">{_text(title)}</a>' for name, title, _ in shown) + "</nav>\n"
    cells = "".join(f"<div><dt>{_text(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in formatting.summary(explanation))
    yield f'<dl class="summary">{cells}</dl>\n'
    for name, title, body in shown:
        yield f'<section id="{name}"><h2>{_text(title)}</h2>\n{body}</section>\n'


def _advice(explanation: Explanation) -> str:
    if not explanation.advice:
        return _paragraph("No advice: nothing was found that could be improved.")
    items = (f"<li><strong>{_text(item.action)}</strong>{_paragraph(item.reason)}{_line(item.line)}</li>" for item in explanation.advice)
    return f'<ol class="advice">{"".join(items)}</ol>'


def _lines(explanation: Explanation) -> str:
    if not explanation.costs:
        return ""
    bars = {str(cost.line): cost.seconds for cost in explanation.costs}
    rows = [
        (f"{cost.share:.1%}", formatting.seconds(cost.seconds), _line_cell(cost.line), ", ".join(cost.kinds)) for cost in explanation.costs
    ]
    rest = formatting.unplaced_sentence(explanation)
    return _bars("The costliest lines", bars) + _table(("share", "time", "line", "mostly"), rows, numbers=2) + _paragraph(rest, "dim")


def _break(explanation: Explanation) -> Iterable[str]:
    for item in explanation.breaks:
        times = f" ({item.count} times)" if item.count > 1 else ""
        yield f"<h3>{_text(item.reason)}{times}</h3>{_line(item.line)}{_paragraph(item.explanation)}"
        if item.hints:
            yield "<ul>" + "".join(f"<li>{_text(hint)}</li>" for hint in item.hints) + "</ul>"


def _recompilations(explanation: Explanation) -> str:
    rows = [(str(item.line), item.reason) for item in explanation.recompilations]
    return _table(("function", "since"), rows) if rows else ""


def _phases(explanation: Explanation) -> str:
    return _bars("Phases", explanation.phases)


def _captured(captured: CapturedGraph) -> str:
    lines = _line(captured.line) + _paragraph(formatting.end_sentence(captured), "dim")
    lines += _table(formatting.FALLBACK, [formatting.fallback_row(item) for item in captured.fallbacks]) if captured.fallbacks else ""
    lines += _table(formatting.REWRITE, [formatting.rewrite_row(rewrite) for rewrite in captured.rewrites]) if captured.rewrites else ""
    inner = "".join(map(_graph, captured.graphs))
    size = formatting.number(sum(graph.size for graph in captured.graphs), "op")
    return f"<details open><summary>{_text(formatting.title(captured))}: {size}</summary>{lines}{inner}</details>\n"


def _graph(graph: Graph) -> str:
    shown = "".join(_table(columns, rows) for columns, rows in formatting.tables(graph))
    return f"<h3>{_text(graph.name)} <span class=dim>({_text(graph.phase)})</span></h3>{_table((), formatting.facts(graph))}{shown}"


class _Html(str):
    """A string that is HTML already, and needs no escaping."""


def _text(text: str) -> str:
    return text if isinstance(text, _Html) else html.escape(text, quote=True)


def _paragraph(text: str, kind: str = "") -> str:
    return f"<p{f' class={kind}' if kind else ''}>{_text(text)}</p>" if text else ""


def _line(line: Line | None) -> str:
    if line is None:
        return ""
    source = f'<span class="source">{_text(line.source)}</span>' if line.source else ""
    return f'<p class="dim" title="{_text(line.file)}">{_text(str(line))}</p>{source}'


def _line_cell(line: Line) -> str:
    return _Html(f"{_text(str(line))}<br><code>{_text(line.source)}</code>")


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: int = 0) -> str:
    head = f"<thead><tr>{''.join(f'<th>{_text(column)}</th>' for column in columns)}</tr></thead>" if columns else ""
    body = []
    for row in rows:
        cells = [f"<td{' class=n' if index < numbers else ''}>{_text(cell)}</td>" for index, cell in enumerate(row)]
        if not columns:
            cells[0] = f"<th>{_text(row[0])}</th>"
        body.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table>{head}<tbody>{"".join(body)}</tbody></table></div>\n'


def _bars(title: str, values: Mapping[str, float]) -> str:
    """Returns an SVG bar chart of seconds by name."""
    largest = max(values.values(), default=0.0) or 1.0
    bar_width = _WIDTH - _NAMES - _VALUES
    rows = []
    for index, (name, value) in enumerate(values.items()):
        top, width = index * _ROW, max(1.0, bar_width * value / largest)
        label = name if len(name) <= 36 else f"{name[:35]}…"
        rows.append(
            f'<text x="0" y="{top + 16}"><title>{_text(name)}</title>{_text(label)}</text>'
            f'<rect class="rail" x="{_NAMES}" y="{top + 4}" width="{bar_width}" height="{_ROW - 8}"/>'
            f'<rect class="bar" x="{_NAMES}" y="{top + 4}" width="{width:.1f}" height="{_ROW - 8}"/>'
            f'<text x="{_NAMES + bar_width + 8}" y="{top + 16}">{_text(formatting.seconds(value))}</text>'
        )
    height = _ROW * len(rows)
    return (
        f'<svg role="img" aria-label="{_text(title)}" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}">'
        f"{''.join(rows)}</svg>\n"
    )
