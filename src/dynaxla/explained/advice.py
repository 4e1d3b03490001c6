"""Rules that derive advice from an explanation. Each yields advice only where it applies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from . import formatting
from .explanation import Advice, Break, Explanation

# The fraction of a later call spent outside of programs above which dispatch overhead is reported as the bottleneck, and the seconds up to
# which a program counts as short.
_OUTSIDE, _SHORT = 0.5, 200e-6
# The fraction of XLA's time above which a line, or torch's kernels for ops without a lowering, are mentioned.
_MUCH = 0.3
_LONG_COMPILE = 20.0

Rule = Callable[[Explanation], Iterator[Advice]]


def advise(found: Explanation) -> tuple[Advice, ...]:
    """Returns the advice of all rules, the most important first."""
    return tuple(advice for rule in _RULES for advice in rule(found))


def _failed(found: Explanation) -> Iterator[Advice]:
    if found.error:
        yield Advice("Fix this error first", f"{found.error}. The advice below is about the calls before it.")


def _nothing(found: Explanation) -> Iterator[Advice]:
    if found.captured or found.error:
        return
    if found.is_script:
        why = "Nothing in the script was compiled."
    elif found.breaks:
        why = "TorchDynamo found no op before the places where it had to stop, and all ran in eager mode."
    else:
        why = "It computes nothing with tensors, or only in functions that torch.compile leaves alone (torch.compiler.disable, C code)."
    yield Advice('Let torch.compile(..., backend="dynaxla") or dynaxla.compile_step see the code that computes', why)


# Regular expressions for the reason or the line of a graph break, and the advice that removes it.
_REMEDIES = (
    (r"^.*(\bprint\b|logging|warnings)", "Take the print or log call out of the compiled function, or let it run rarely"),
    (r"Tensor\.item|\.item\(|\.tolist\(|scalar", "Keep the value a tensor, or compute the Python number outside of the compiled function"),
    (
        r"Data-dependent branching|jump",
        "Compute both ways and take torch.where of them, or torch.cond; or decide outside of the compiled function",
    ),
    (r"backward|[Oo]ptimizer", "Compile the whole step, backward and optimizer, with dynaxla.compile_step"),
    (r"numpy|from_numpy", "Compute it with torch, or outside of the compiled function"),
    (r"graph_break\(\)", "Remove torch._dynamo.graph_break()"),
    (r"disable", "Remove torch.compiler.disable from the function that is called here, if it is yours"),
    (
        r"nonzero|dynamic output shape|Dynamic shape operator",
        "Use an op with a result of fixed size (torch.where, a mask), or move the op out of the compiled function",
    ),
)


def _breaks(found: Explanation) -> Iterator[Advice]:
    by_remedy: dict[str, list[Break]] = {}
    for item in found.breaks:
        by_remedy.setdefault(_remedy(item), []).append(item)
    for remedy, (first, *others) in by_remedy.items():
        why = f"The graph breaks here{_times(first.count)}: {first.reason}. {first.explanation}".strip()
        places = ", ".join(str(other.line) for other in others)
        yield Advice(remedy, f"{why} The same holds at {places}." if others else why, first.line)


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""


def _remedy(item: Break) -> str:
    text = f"{item.reason} {item.explanation} {item.line.source if item.line is not None else ''}"
    for words_of_it, remedy in _REMEDIES:
        if re.search(words_of_it, text):
            return remedy
    hints = [hint for hint in item.hints if "report an issue" not in hint]
    return hints[0] if hints else "Move it out of the compiled function"


def _backward(found: Explanation) -> Iterator[Advice]:
    phases = {graph.phase for graph in found.graphs}
    breaks_there = any("backward" in item.reason for item in found.breaks)
    if "backward" in phases and not breaks_there and not any(captured.is_step for captured in found.captured):
        why = "Forward and backward pass are separate programs, and the optimizer runs in Python. A compiled step is one program."
        yield Advice("If this is a training step, compile the whole of it with dynaxla.compile_step", why)
    elif "forward" in phases and "backward" not in phases:
        why = "The programs keep values for a backward pass, and no backward pass followed."
        yield Advice("For inference, call it under torch.no_grad()", why)


def _recompilations(found: Explanation) -> Iterator[Advice]:
    sizes = [item for item in found.recompilations if "size mismatch" in item.reason or "stride mismatch" in item.reason]
    for line in dict.fromkeys(item.line for item in sizes):
        reasons = [item.reason for item in sizes if item.line == line]
        what = "Say which sizes change: torch._dynamo.mark_dynamic(tensor, dim) before the first call, or torch.compile(..., dynamic=True)"
        yield Advice(what, f"It was captured {len(reasons) + 1} times, since sizes changed: {reasons[0]}", line)
    others = [item for item in found.recompilations if item not in sizes]
    for line in dict.fromkeys(item.line for item in others):
        reasons = [item.reason for item in others if item.line == line]
        why = f"It was captured {len(reasons) + 1} times, since something that it depends on changed: {reasons[0]}"
        yield Advice("Pass the changing value as a tensor, or do not read it in the compiled function", why, line)
    for graph in found.graphs:
        if len(graph.programs) > 3 and len({program.sizes for program in graph.programs}) > 3 and graph.phase == "inference":
            why = f"{graph.name} has {len(graph.programs)} programs, one for each combination of sizes."
            yield Advice('Give sizes that change a bucket: options={"sizes": "buckets"}', why)


def _copies(found: Explanation) -> Iterator[Advice]:
    for graph in found.graphs:
        for copy in graph.copies:
            if not copy.later:
                continue
            if "aligned" in copy.reason:
                what = f"Copy {copy.argument} once: a slice such as x[1:] starts at an address that XLA cannot read"
            elif "strides" in copy.reason:
                what = f"Call .contiguous() on {copy.argument} once before the loop, or always pass the memory order of the first call"
            elif "conjugate" in copy.reason:
                what = f"Call .resolve_conj().resolve_neg() on {copy.argument} once, outside of the loop"
            else:
                what = f"Keep {copy.argument} on the program's device"
            yield Advice(what, f"{graph.name} copies {formatting.size(copy.bytes)} of it at each call: {copy.reason}.")


def _fallbacks(found: Explanation) -> Iterator[Advice]:
    by_torch = sum(cost.share for cost in found.costs if "torch's kernel" in cost.what[:1])
    for item in {fallback.op: fallback for fallback in formatting.fallbacks(found)}.values():
        if "the graph is split" in item.reason or item.op == "a graph":
            what = "Use an op with a result of fixed size (torch.where instead of x[mask]), or move it to the end"
            why = f"{item.op}: {item.reason} ({item.where})."
        else:
            what = f"Write a lowering of {item.op} (dynaxla.lowers; docs/add-an-op.md), or use ops that have one"
            much = ", and lines of torch's kernels take much of XLA's time" if by_torch > _MUCH else ""
            why = f"torch's own kernel computes it, since {item.reason} ({item.where}){much}."
        yield Advice(what, why)


def _overhead(found: Explanation) -> Iterator[Advice]:
    if found.later_seconds is None or found.xla_seconds is None or found.is_script or not found.captured:
        return
    outside = found.later_seconds - found.xla_seconds - found.torch_seconds
    programs = sum(len(graph.programs) for graph in found.graphs)
    if outside > _OUTSIDE * found.later_seconds and found.later_seconds < programs * _SHORT * 10:
        what = "Compute more in a call: a larger batch, or a loop inside of the compiled function"
        whole, rest = formatting.seconds(found.later_seconds), formatting.seconds(outside)
        inside = "XLA's programs and torch's kernels" if found.torch_seconds else "XLA's programs"
        why = f"Of a call's {whole}, {rest} are outside of {inside}: Python, torch's guards."
        yield Advice(what, why)


def _lines(found: Explanation) -> Iterator[Advice]:
    for cost in found.costs[:1]:
        if cost.share > _MUCH:
            what = f"Optimize this {'line' if cost.line.file else 'module'} first: it takes the largest part of the time"
            kinds = ", ".join(cost.what)
            whose = "torch's kernels and XLA's programs take" if found.torch_seconds else "XLA spends"
            yield Advice(what, f"Of the time that {whose}, {cost.share:.0%} is on it, mostly on {kinds}.", cost.line)


def _tuning(found: Explanation) -> Iterator[Advice]:
    chosen = [item for graph in found.graphs for item in graph.implementations]
    several = [item for item in chosen if item.others and item.is_measurable and not item.seconds]
    if several and found.xla_seconds and found.xla_seconds > 0.01 and not found.is_script:
        ops = ", ".join(sorted({item.op for item in several}))
        why = f"{formatting.number(len(several), 'problem')} ({ops}) can be computed in other ways than the expected one."
        yield Advice('Measure the implementations on this machine: options={"tune": True}', why)


def _first_call(found: Explanation) -> Iterator[Advice]:
    compiled = found.phases.get("XLA's compiler", 0.0)
    if compiled > _LONG_COMPILE:
        why = f"XLA's compiler took {formatting.seconds(compiled)} here. Later processes find programs in the cache directory."
        yield Advice('If starting is slow: options={"compile": "background"} runs torch\'s kernels until XLA is done', why)


def _steps(found: Explanation) -> Iterator[Advice]:
    for way in found.ways:
        if "eager" in way:
            what = "Move effects out of the step (prints, .item(), files), so that it is recorded as one program"
            yield Advice(what, f"{way}.")


_RULES: tuple[Rule, ...] = (
    _failed, _nothing, _breaks, _steps, _recompilations, _backward, _copies, _fallbacks, _lines, _overhead, _tuning, _first_call,
)  # fmt: skip
