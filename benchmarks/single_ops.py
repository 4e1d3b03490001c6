"""`python -m benchmarks cpu ops`: single ops, compiled and in eager mode. Writes ops.md and ops.json.

The time of a compiled call has two parts: the op's program, and the cost that every compiled call has (TorchDynamo's guards, and for a
gradient autograd's own work). An *empty* call is a compiled sum of as many tensors of one element as the op has inputs: its time is the
second part alone. Eager, compiled and empty calls take turns. Where the op's program takes more than 1.25 times eager mode's time, the
backend "aot_eager" is measured in the same way: eager mode's own kernels behind TorchDynamo and AOTAutograd, whose cost no backend avoids.
It is measured afterwards, because five engines in turn would evict each other's data from the processor's caches.
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

from dynaxla.autoselect.agreement import compare
from dynaxla.bench import report
from dynaxla.bench.argument_checks import check_writable
from dynaxla.bench.measure import process_settings
from dynaxla.bench.runner import first_line

from . import tables
from .cells import Cells
from .single_op_cases import CASES, OpCase
from .single_ops_left_out import left_out

FORWARD, GRADIENT = "forward", "gradient"
# As many calls are timed together as take about this long (at most 100), so that the clock's resolution does not matter.
_SECONDS_TOGETHER = 0.004
# Each part has copies of the inputs at other addresses: the addresses of tensors can change an op's time by a third.
_PARTS = 3
_LEAST_ROUNDS, _MOST_ROUNDS = 2, 15  # in each part
_COLUMNS = ("eager", "dynaxla", "empty")
# The ratio of dynaxla's time, beyond an empty call, to eager mode's, above which an op counts as slower.
_BEHIND = 1.25

INTRODUCTION = """\
# Single ops

Made by `python -m benchmarks cpu ops`: ops of PyTorch's database with realistic sizes, compiled alone, on one thread. The dtype is float32
unless the name has another. Each result has been compared with eager mode. Gradients of results have the layouts of the results. The
slowest rows are first.

- *eager*, *dynaxla*: milliseconds of a call, the medians of calls in turn, with three copies of the inputs.
- *empty*: milliseconds of a compiled call that computes almost nothing.
- *beyond*: dynaxla's time minus that of the empty call, divided by eager mode's time: the cost of the op itself.
- *whole*: dynaxla's time divided by eager mode's.
- *CPU*: *beyond* in CPU time, for a machine that does other work.
- *aot_eager*: *beyond* of torch's backend of that name, which runs eager mode's kernels under TorchDynamo and AOTAutograd: the cost of
  these two alone. It was measured later, in turn with eager mode, for rows whose *beyond* is above 1.25.
"""


@dataclass(frozen=True)
class Measured:
    """Median milliseconds of calls.

    Attributes:
        eager: wall time in eager mode.
        dynaxla: wall time of the compiled op.
        empty: wall time of an empty call.
        eager_cpu: CPU time in eager mode.
        dynaxla_cpu: CPU time of the compiled op.
        empty_cpu: CPU time of an empty call.
        aot_eager: the ratio of the time of the backend "aot_eager", beyond an empty call, to eager mode's; None if it is not measured.
        failure: why there are no times, or how the results disagree; or "".
    """

    eager: float = 0.0
    dynaxla: float = 0.0
    empty: float = 0.0
    eager_cpu: float = 0.0
    dynaxla_cpu: float = 0.0
    empty_cpu: float = 0.0
    aot_eager: float | None = None
    failure: str = ""


def write(output: Path, names: Sequence[str], seconds: float) -> bool:
    """Measures the cases with one of `names` in their name (all, if none are named), and writes the tables.

    Each row is timed for about `seconds`.

    Returns: True if nothing failed or disagreed with eager mode.
    Raises: BenchmarkError.
    """
    check_writable(output)
    chosen = {name: case for name, case in CASES.items() if not names or any(part in name for part in names)}
    file = output / "ops.json"
    kept: dict[str, Any] = json.loads(file.read_text())["rows"] if file.exists() and names else {}
    cells = Cells(output / "unfinished-ops.json", report.environment())
    with process_settings(1):
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
    """Measures one op, forward or with its gradient, for about `seconds`."""
    try:
        inputs, engines = case.inputs(), _engines(case, "dynaxla")
        calls = _calls(engines, inputs, kind)
        expected, found = calls["eager"](), calls["compiled"]()
        agreement = compare(found, expected, _in_float64(case, inputs, kind), gradients=kind == GRADIENT)
        if not agreement.agrees:
            return Measured(failure=f"disagrees with eager: {agreement.detail or agreement.error}")
        del expected, found, calls
        times = _timed(engines, inputs, kind, seconds)
        aot_eager = None
        if _beyond(times["eager"], times["compiled"], times["empty"]) > _BEHIND:
            others = _timed(_engines(case, "aot_eager"), inputs, kind, seconds)
            aot_eager = _beyond(others["eager"], others["compiled"], others["empty"])
        eager, dynaxla, empty, eager_cpu, dynaxla_cpu, empty_cpu = (
            times[f"{name}{of}"] for of in ("", "_cpu") for name in ("eager", "compiled", "empty")
        )
        return Measured(eager, dynaxla, empty, eager_cpu, dynaxla_cpu, empty_cpu, aot_eager)
    except Exception as error:
        return Measured(failure=first_line(error))
    finally:
        gc.collect()


def _engines(case: OpCase, backend: str) -> dict[str, Callable[..., Any]]:
    torch._dynamo.reset()
    compiled, empty = (torch.compile(function, backend=backend, fullgraph=True) for function in (case.function, _sum))
    return {"eager": case.function, "compiled": compiled, "empty": empty}


def _calls(engines: Mapping[str, Callable[..., Any]], inputs: Sequence[torch.Tensor], kind: str) -> dict[str, Callable[[], Any]]:
    small = [torch.ones(1, dtype=tensor.dtype) for tensor in inputs]
    return {name: _call(function, small if name == "empty" else inputs, kind) for name, function in engines.items()}


def _sum(*tensors: torch.Tensor) -> Any:
    """Returns the sum of tensors and 1, so that there is an op to compile for a single tensor, too."""
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
    # Most layers get dense gradients in the layout of their results, unlike the gradient of a mean, which is an expanded number.
    grads = [torch.empty_like(out).copy_(torch.randn(out.shape, generator=generator)) for out in outputs]

    def gradient() -> Any:
        return torch.autograd.grad(_differentiable(function(*leaves)), wanted, grads, allow_unused=True)

    return gradient


def _differentiable(results: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def _in_float64(case: OpCase, inputs: Sequence[torch.Tensor], kind: str) -> Any:
    """Returns the result in float64, to judge results that differ from eager mode's; None if the op does not support float64."""
    wide = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    try:
        return _call(case.function, wide, kind)()
    except Exception:
        return None


def _timed(engines: Mapping[str, Callable[..., Any]], inputs: Sequence[torch.Tensor], kind: str, seconds: float) -> dict[str, float]:
    """Returns median milliseconds by engine: wall time, and with the suffix `_cpu` CPU time."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    for _ in range(_PARTS):
        inputs = [tensor.clone(memory_format=torch.preserve_format) for tensor in inputs]
        for name, pairs in _samples(_calls(engines, inputs, kind), seconds / _PARTS).items():
            samples[name] += pairs
    found = {}
    for name, pairs in samples.items():
        found[name], found[f"{name}_cpu"] = (statistics.median(column) * 1e3 for column in zip(*pairs, strict=True))
    return found


def _samples(calls: Mapping[str, Callable[[], Any]], seconds: float) -> dict[str, list[tuple[float, float]]]:
    """Returns samples of a call's seconds by engine: pairs of wall time and CPU time."""
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
            call()  # warm up
            count = together[name]
            start, cpu = time.perf_counter(), time.process_time()
            for _ in range(count):
                result = call()  # lives until the next result exists, as in a user's loop
            stop, cpu_stop = time.perf_counter(), time.process_time()
            samples[name].append(((stop - start) / count, (cpu_stop - cpu) / count))
            del result
    return samples


def _beyond(eager: float, compiled: float, empty: float) -> float:
    return max(compiled - empty, 1e-4) / eager


def ratios(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Returns ratios of dynaxla's time to eager mode's: beyond an empty call; of whole calls; of CPU time beyond an empty call."""
    beyond, cpu = (_beyond(row[f"eager{of}"], row[f"dynaxla{of}"], row[f"empty{of}"]) for of in ("", "_cpu"))
    return beyond, row["dynaxla"] / row["eager"], cpu


def _shown(row: Mapping[str, Any]) -> str:
    if row["failure"]:
        return f"failed: {row['failure']}"
    beyond, whole, cpu = ratios(row)
    times = f"eager {row['eager']:.3f} ms, dynaxla {row['dynaxla']:.3f}"
    return f"{times}, beyond {beyond:.2f}, whole {whole:.2f}, CPU {cpu:.2f}, aot_eager {_aot_eager_cell(row) or 'not measured'}"


def _aot_eager_cell(row: Mapping[str, Any]) -> str:
    return "" if row["aot_eager"] is None else f"{row['aot_eager']:.2f}"


def as_markdown(found: Mapping[str, Any]) -> str:
    rows = found["rows"]
    good = {name: row for name, row in rows.items() if not row["failure"]}
    lines = [INTRODUCTION, tables.circumstances(found["environment"]), "", *_summary(good), ""]
    lines += tables.heading(["op", *_COLUMNS, "beyond", "whole", "CPU", "aot_eager"])
    for name, row in sorted(good.items(), key=lambda item: -ratios(item[1])[0]):
        times = [f"{row[engine]:.3f}" for engine in _COLUMNS]
        lines.append(tables.line([name, *times, *(f"{ratio:.2f}" for ratio in ratios(row)), _aot_eager_cell(row)]))
    lines += ["", *(f"- {name}: {row['failure']}" for name, row in rows.items() if row["failure"])]
    lines += ["", "## Entries without a row", "", "Entries of the database that have no row, by reason:", ""]
    lines += [f"- {reason}: {', '.join(entries)}" for reason, entries in left_out({case.entry for case in CASES.values()}).items()]
    return "\n".join(lines) + "\n"


def _summary(rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = tables.heading(["", "rows", "mean beyond", "mean whole", "beyond 1.0", "beyond 1.25", "of these aot_eager, too", "beyond 2"])
    for kind in (FORWARD, GRADIENT):
        chosen = [row for name, row in rows.items() if name.endswith(f", {kind}")]
        if chosen:
            found = [ratios(row) for row in chosen]
            means = [f"{tables.mean([ratio[place] for ratio in found]):.2f}" for place in (0, 1)]
            above, far, farthest = (sum(ratio[0] > limit for ratio in found) for limit in (1.0, _BEHIND, 2.0))
            counts = [above, far, sum((row["aot_eager"] or 0.0) > _BEHIND for row in chosen), farthest]
            lines.append(tables.line([kind, str(len(chosen)), *means, *map(str, counts)]))
    return lines
