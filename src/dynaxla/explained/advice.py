"""Rules that derive advice from an explanation. Each rule yields advice only where it applies."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from . import formatting
from .explanation import Advice, Break, Explanation

# The fraction of a later call's time, spent neither in programs nor in torch's kernels, above which overhead is reported as the bottleneck.
_OUTSIDE_FRACTION = 0.5
# Overhead is reported only for calls that take less than ten times this time, in seconds, for each program.
_SHORT_SECONDS = 200e-6
# The share of the time of all lines above which advice names a line, or the kernels of torch that compute ops without a lowering.
_LARGE_FRACTION = 0.3
# The seconds in XLA's compiler above which advice names the option compile="background".
_LONG_COMPILE_SECONDS = 20.0

Rule = Callable[[Explanation], Iterator[Advice]]


def advise(explanation: Explanation) -> tuple[Advice, ...]:
    """Returns the advice of all rules, the most important first."""
    return tuple(advice for rule in _RULES for advice in rule(explanation))


def _failed(explanation: Explanation) -> Iterator[Advice]:
    if explanation.error:
        yield Advice("Fix this error first", f"{explanation.error}. The advice below is about the calls before it.")


def _nothing_compiled(explanation: Explanation) -> Iterator[Advice]:
    if explanation.captured or explanation.error:
        return
    if explanation.is_script:
        reason = "Nothing in the script was compiled."
    elif explanation.breaks:
        reason = "TorchDynamo found no op before its graph breaks, so everything ran in eager mode."
    else:
        reason = "The function computes nothing with tensors, or only in functions that TorchDynamo skips (torch.compiler.disable, C code)."
    yield Advice('Let torch.compile(..., backend="dynaxla") or dynaxla.compile_step see the code that computes', reason)


# Regular expressions for the reason or the line of a graph break, and the advice that removes the break.
_REMEDIES = (
    (r"^.*(\bprint\b|logging|warnings)", "Move the print or log call out of the compiled function"),
    (r"Tensor\.item|\.item\(|\.tolist\(|scalar", "Keep the value a tensor, or compute the Python number outside of the compiled function"),
    (
        r"Data-dependent branching|jump",
        "Compute both branches and select with torch.where, or use torch.cond; or branch outside of the compiled function",
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


def _breaks(explanation: Explanation) -> Iterator[Advice]:
    by_remedy: dict[str, list[Break]] = {}
    for item in explanation.breaks:
        by_remedy.setdefault(_remedy(item), []).append(item)
    for remedy, (first, *others) in by_remedy.items():
        reason = f"The graph breaks here{_times(first.count)}: {first.reason}. {first.explanation}".strip()
        places = ", ".join(str(other.line) for other in others)
        yield Advice(remedy, f"{reason} The same advice applies at {places}." if others else reason, first.line)


def _times(count: int) -> str:
    return f" ({count} times)" if count > 1 else ""


def _remedy(item: Break) -> str:
    text = f"{item.reason} {item.explanation} {item.line.source if item.line is not None else ''}"
    for pattern, remedy in _REMEDIES:
        if re.search(pattern, text):
            return remedy
    hints = [hint for hint in item.hints if "report an issue" not in hint]
    return hints[0] if hints else "Move it out of the compiled function"


def _backward(explanation: Explanation) -> Iterator[Advice]:
    phases = {graph.phase for graph in explanation.graphs}
    breaks_there = any("backward" in item.reason for item in explanation.breaks)
    if "backward" in phases and not breaks_there and not any(captured.is_step for captured in explanation.captured):
        reason = "Forward and backward pass are separate programs, and the optimizer runs in Python. A compiled step is one program."
        yield Advice("If this is a training step, compile the whole of it with dynaxla.compile_step", reason)
    elif "forward" in phases and "backward" not in phases:
        reason = "The programs save values for a backward pass, but no backward pass followed."
        yield Advice("For inference, call the function under torch.no_grad()", reason)


def _recompilations(explanation: Explanation) -> Iterator[Advice]:
    sizes = [item for item in explanation.recompilations if "size mismatch" in item.reason or "stride mismatch" in item.reason]
    for line in dict.fromkeys(item.line for item in sizes):
        reasons = [item.reason for item in sizes if item.line == line]
        action = (
            "Say which sizes change: torch._dynamo.mark_dynamic(tensor, dim) before the first call, or torch.compile(..., dynamic=True)"
        )
        yield Advice(action, f"The function was captured {len(reasons) + 1} times, since sizes changed: {reasons[0]}", line)
    others = [item for item in explanation.recompilations if item not in sizes]
    for line in dict.fromkeys(item.line for item in others):
        reasons = [item.reason for item in others if item.line == line]
        reason = f"The function was captured {len(reasons) + 1} times, since something that it reads changed: {reasons[0]}"
        yield Advice("Pass the changing value as a tensor, or do not read it in the compiled function", reason, line)
    for graph in explanation.graphs:
        if len(graph.programs) > 3 and len({program.sizes for program in graph.programs}) > 3 and graph.phase == "inference":
            reason = f"{graph.name} has {len(graph.programs)} programs, one for each combination of sizes."
            yield Advice('Let changing sizes share programs: options={"sizes": "buckets"}', reason)


def _copies(explanation: Explanation) -> Iterator[Advice]:
    for graph in explanation.graphs:
        for copy in graph.copies:
            if not copy.later:
                continue
            if "aligned" in copy.reason:
                action = f"Copy {copy.argument} once: a slice such as x[1:] does not start at an address that is aligned for XLA"
            elif "strides" in copy.reason:
                action = f"Call .contiguous() on {copy.argument} once before the loop, or always pass the memory order of the first call"
            elif "conjugate" in copy.reason:
                action = f"Call .resolve_conj().resolve_neg() on {copy.argument} once, outside of the loop"
            else:
                action = f"Keep {copy.argument} on the program's device"
            yield Advice(action, f"{graph.name} copies this argument ({formatting.size(copy.bytes)}) at each call: {copy.reason}.")


def _fallbacks(explanation: Explanation) -> Iterator[Advice]:
    by_torch = sum(cost.share for cost in explanation.costs if "torch's kernel" in cost.kinds[:1])
    for item in {fallback.op: fallback for fallback in formatting.fallbacks(explanation)}.values():
        if "the graph is split" in item.reason or item.op == "a graph":
            action = "Use an op with a result of fixed size (torch.where instead of x[mask]), or move it to the end"
            reason = f"{item.op}: {item.reason} ({item.where})."
        else:
            action = f"Write a lowering of {item.op} (dynaxla.lowers; docs/add-an-op.md), or use ops that have one"
            cost_note = ", and lines with such kernels take much of the time" if by_torch > _LARGE_FRACTION else ""
            reason = f"torch's own kernel computes it, since {item.reason} ({item.where}){cost_note}."
        yield Advice(action, reason)


def _overhead(explanation: Explanation) -> Iterator[Advice]:
    if explanation.later_seconds is None or explanation.xla_seconds is None or explanation.is_script or not explanation.captured:
        return
    outside = explanation.later_seconds - explanation.xla_seconds - explanation.torch_seconds
    programs = sum(len(graph.programs) for graph in explanation.graphs)
    if outside > _OUTSIDE_FRACTION * explanation.later_seconds and explanation.later_seconds < programs * _SHORT_SECONDS * 10:
        action = "Compute more in a call: a larger batch, or a loop inside of the compiled function"
        total, rest = formatting.seconds(explanation.later_seconds), formatting.seconds(outside)
        inside = "XLA's programs and torch's kernels" if explanation.torch_seconds else "XLA's programs"
        reason = f"Of a call's {total}, {rest} are spent outside of {inside}: in Python and torch's guards."
        yield Advice(action, reason)


def _lines(explanation: Explanation) -> Iterator[Advice]:
    for cost in explanation.costs[:1]:
        if cost.share > _LARGE_FRACTION:
            action = f"Optimize this {'line' if cost.line.file else 'module'} first: it takes the largest part of the time"
            kinds = ", ".join(cost.kinds)
            whose = "torch's kernels and XLA's programs take" if explanation.torch_seconds else "XLA spends"
            yield Advice(action, f"Of the time that {whose}, {cost.share:.0%} is spent on it, mostly on {kinds}.", cost.line)


def _tuning(explanation: Explanation) -> Iterator[Advice]:
    unmeasured = [
        choice
        for graph in explanation.graphs
        for choice in graph.implementations
        if choice.others and choice.is_measurable and not choice.seconds
    ]
    if unmeasured and explanation.xla_seconds and explanation.xla_seconds > 0.01 and not explanation.is_script:
        ops = ", ".join(sorted({choice.op for choice in unmeasured}))
        reason = f"{formatting.number(len(unmeasured), 'problem')} ({ops}) can be computed by other implementations than the expected one."
        yield Advice('Measure the implementations on this machine: options={"tune": True}', reason)


def _first_call(explanation: Explanation) -> Iterator[Advice]:
    compiled = explanation.phases.get("XLA's compiler", 0.0)
    if compiled > _LONG_COMPILE_SECONDS:
        reason = f"XLA's compiler took {formatting.seconds(compiled)} here. Later processes find programs in the cache directory."
        yield Advice('If starting is slow: options={"compile": "background"} runs torch\'s kernels until XLA is done', reason)


def _steps(explanation: Explanation) -> Iterator[Advice]:
    for way in explanation.step_modes:
        if "eager" in way:
            action = "Move effects out of the step (prints, .item(), files), so that it is recorded as one program"
            yield Advice(action, f"{way}.")


_RULES: tuple[Rule, ...] = (
    _failed, _nothing_compiled, _breaks, _steps, _recompilations, _backward, _copies, _fallbacks, _lines, _overhead, _tuning, _first_call,
)  # fmt: skip
