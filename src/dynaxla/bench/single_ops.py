"""`dynaxla bench-cpu ops`: single ops, compiled and in eager mode. It writes ops.md and ops.json, op by op.

A compiled call is the op's program and what any call costs (TorchDynamo's guards, and for a gradient autograd's own work). An *empty* call
compiles a sum of as many numbers as the op has inputs, each a tensor of one element: its time is that cost. The backend "aot_eager" is
measured so too: eager mode's own kernels behind TorchDynamo and AOTAutograd, which no backend escapes. All take turns.
"""

from __future__ import annotations

import functools
import gc
import json
import operator
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..ensemble.agreement import compare
from . import report, tables
from .cells import Cells
from .measure import prepared_process
from .requests import check_writable
from .runner import first_line
from .single_op_cases import CASES, OpCase
from .single_ops_left_out import left_out

FORWARD, GRADIENT = "forward", "gradient"
# Calls are timed together until they take about this long, so that the clock's own resolution does not show.
_SECONDS_TOGETHER = 0.004
_LEAST_ROUNDS, _MOST_ROUNDS = 5, 40

INTRODUCTION = """\
# Single ops

Made by `dynaxla bench-cpu ops`: ops of PyTorch's database at sizes that people use, compiled alone, float32 unless the name says something
else, one thread. *eager*, *dynaxla*: milliseconds of a call, medians of calls in turn. *empty*: a compiled call that computes nothing to
speak of. *beyond*: dynaxla's time without an empty call's, over eager's: what the op itself costs. *whole*: dynaxla's time over eager's.
*CPU*: *beyond* in the processor's time, for a machine that does other work. *aot_eager*: *beyond* of torch's backend of that name, which is
eager mode's own kernels behind TorchDynamo and AOTAutograd: what these cost alone. Gradients of results are laid out as these are. Worst
first. Each result has been compared with eager mode's.
"""


@dataclass(frozen=True)
class Measured:
    """Milliseconds of calls, medians, by the clock and (`..._cpu`) of the processor. failure: why there are none, or what disagrees; ""."""

    eager: float = 0.0
    dynaxla: float = 0.0
    empty: float = 0.0
    aot_eager: float = 0.0
    aot_empty: float = 0.0
    eager_cpu: float = 0.0
    dynaxla_cpu: float = 0.0
    empty_cpu: float = 0.0
    aot_eager_cpu: float = 0.0
    aot_empty_cpu: float = 0.0
    failure: str = ""


def write(output: Path, names: Sequence[str], seconds: float) -> bool:
    """Measure what is asked for (all cases, if none are named), and write the tables. Whether nothing failed or disagreed with eager.

    seconds: about as long as each row is timed. Raises: BenchmarkError.
    """
    check_writable(output)
    chosen = {name: case for name, case in CASES.items() if not names or any(part in name for part in names)}
    file = output / "ops.json"
    kept: dict[str, Any] = json.loads(file.read_text())["rows"] if file.exists() and names else {}
    cells = Cells(output / "unfinished-ops.json", report.environment())
    with prepared_process(1):
        for case in chosen.values():
            for kind in (FORWARD, GRADIENT)[: 1 + case.differentiable]:
                row = f"{case.name}, {kind}"
                kept[row] = cells.measured(row, lambda case=case, kind=kind: asdict(measure(case, kind, seconds)))
                print(f"{row}: {_shown(kept[row])}", flush=True)
    file.write_text(json.dumps({"environment": report.environment(), "rows": kept}, indent=1) + "\n")
    (output / "ops.md").write_text(as_markdown(json.loads(file.read_text())))
    cells.done()
    return not any(row["failure"] for row in kept.values())


def measure(case: OpCase, kind: str, seconds: float) -> Measured:
    """One op, forward or with its gradient. seconds: about as long as it is timed."""
    torch._dynamo.reset()
    inputs = case.inputs()
    small = [torch.ones(1, dtype=tensor.dtype) for tensor in inputs]
    compiled, empty, aot_eager, aot_empty = (
        torch.compile(function, backend=backend, fullgraph=True)
        for backend in ("dynaxla", "aot_eager")
        for function in (case.function, _sum)
    )
    try:
        calls = {
            "eager": _call(case.function, inputs, kind),
            "dynaxla": _call(compiled, inputs, kind),
            "empty": _call(empty, small, kind),
            "aot_eager": _call(aot_eager, inputs, kind),
            "aot_empty": _call(aot_empty, small, kind),
        }
        expected, found = calls["eager"](), calls["dynaxla"]()
        agreement = compare(found, expected, _in_float64(case, inputs, kind), gradients=kind == GRADIENT)
        if not agreement.agrees:
            return Measured(failure=f"disagrees with eager: {agreement.detail or agreement.error}")
        del expected, found
        times: dict[str, Any] = {**_timed(calls, seconds)}
        return Measured(**times)
    except Exception as error:
        return Measured(failure=first_line(error))
    finally:
        gc.collect()


def _sum(*tensors: torch.Tensor) -> Any:
    """And one: of a single tensor, too, there is something to compile."""
    return functools.reduce(operator.add, tensors, 1)


def _call(function: Callable[..., Any], inputs: Sequence[torch.Tensor], kind: str) -> Callable[[], Any]:
    if kind == FORWARD:

        def forward() -> Any:
            with torch.no_grad():
                return function(*inputs)

        return forward
    leaves = [tensor.detach().clone(memory_format=torch.preserve_format) for tensor in inputs]
    wanted = [leaf.requires_grad_() for leaf in leaves if leaf.is_floating_point()]
    outputs = _differentiable(function(*leaves))
    generator = torch.Generator().manual_seed(1)
    # A mean's gradient is an expanded number; most layers get gradients that fill memory, in the order in which the layer behind computed.
    grads = [torch.empty_like(out).copy_(torch.randn(out.shape, generator=generator)) for out in outputs]

    def gradient() -> Any:
        return torch.autograd.grad(_differentiable(function(*leaves)), wanted, grads, allow_unused=True)

    return gradient


def _differentiable(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _in_float64(case: OpCase, inputs: Sequence[torch.Tensor], kind: str) -> Any:
    """What judges results that are farther from eager's than rounding explains; None where there is no such thing."""
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    try:
        return _call(case.function, wide, kind)()
    except Exception:
        return None


def _timed(calls: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Medians in milliseconds, by engine, and of the processor's time."""
    together = {}
    for name, call in calls.items():
        for _ in range(2):
            call()
        start = time.perf_counter()
        call()
        together[name] = max(1, min(100, int(_SECONDS_TOGETHER / (time.perf_counter() - start))))
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    for number in range(_MOST_ROUNDS):
        if number >= _LEAST_ROUNDS and time.perf_counter() > end:
            break
        for name, call in calls.items():
            call()  # warm
            count = together[name]
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                result = call()  # which lives until the next one is there, as with a user
            stop, cpu_stop = time.perf_counter(), time.process_time()
            samples[name].append(((stop - start) / count, (cpu_stop - cpu) / count))
            del result
    found = {}
    for name, pairs in samples.items():
        found[name], found[f"{name}_cpu"] = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    return found


def ratios(row: Mapping[str, Any]) -> tuple[float, float, float, float]:
    """Of dynaxla's time to eager's: beyond an empty call; whole; beyond an empty call, the processor's time. And of aot_eager's: beyond."""
    beyond = max(row["dynaxla"] - row["empty"], 1e-4) / row["eager"]
    cpu = max(row["dynaxla_cpu"] - row["empty_cpu"], 1e-4) / row["eager_cpu"]
    return beyond, row["dynaxla"] / row["eager"], cpu, max(row["aot_eager"] - row["aot_empty"], 1e-4) / row["eager"]


def _shown(row: Mapping[str, Any]) -> str:
    if row["failure"]:
        return f"failed: {row['failure']}"
    beyond, whole, cpu, around = ratios(row)
    times = f"eager {row['eager']:.3f} ms, dynaxla {row['dynaxla']:.3f}"
    return f"{times}, beyond {beyond:.2f}, whole {whole:.2f}, CPU {cpu:.2f}, aot_eager {around:.2f}"


def as_markdown(found: Mapping[str, Any]) -> str:
    rows = found["rows"]
    good = {name: row for name, row in rows.items() if not row["failure"]}
    lines = [INTRODUCTION, tables.circumstances(found["environment"]), "", *_summary(good), ""]
    lines += tables.heading(["op", "eager", "dynaxla", "empty", "beyond", "whole", "CPU", "aot_eager"])
    for name, row in sorted(good.items(), key=lambda item: -ratios(item[1])[0]):
        times = [f"{row[engine]:.3f}" for engine in ("eager", "dynaxla", "empty")]
        lines.append(tables.line([name, *times, *(f"{ratio:.2f}" for ratio in ratios(row))]))
    lines += ["", *(f"- {name}: {row['failure']}" for name, row in rows.items() if row["failure"])]
    lines += ["", "## What is left out", "", "Entries of the database that have no row:", ""]
    lines += [f"- {reason}: {', '.join(entries)}" for reason, entries in left_out({case.entry for case in CASES.values()}).items()]
    return "\n".join(lines) + "\n"


def _summary(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = tables.heading(["", "rows", "mean beyond", "mean whole", "beyond 1.0", "beyond 1.25", "of these behind aot_eager", "beyond 2"])
    for kind in (FORWARD, GRADIENT):
        chosen = [ratios(row) for name, row in rows.items() if name.endswith(f", {kind}")]
        if chosen:
            means = [f"{tables.mean([ratio[place] for ratio in chosen]):.2f}" for place in (0, 1)]
            above, far, farthest = ([ratio for ratio in chosen if ratio[0] > limit] for limit in (1.0, 1.25, 2.0))
            counts = [len(above), len(far), sum(ratio[0] > ratio[3] for ratio in far), len(farthest)]
            lines.append(tables.line([kind, str(len(chosen)), *means, *map(str, counts)]))
    return lines
