"""Calls of a model with many different lengths: `python -m benchmarks.lengths ENGINE CASE`, in a process of its own.

Every call is the first with its length: the cost of compilation shows in the calls themselves, or in another thread. After all compilations
have ended, the same lengths are called again. Costs that eager mode has, too, are not counted: importing torch, building the model, first
eager calls. One thread is used.
"""

from __future__ import annotations

import functools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from dynaxla.autoselect import agreement
from dynaxla.bench.benchmark_error import BenchmarkError
from dynaxla.bench.suites import Bert, import_package
from dynaxla.bench.training import TrainingStep

from . import ROOT, tables
from .cells import Cells
from .second_start import cpu_seconds

LONGEST = 512
# The number of first calls that medians and `Run.slow` ignore: an engine may still be busy with its first compilations.
FIRST = 10
# A call is slow if it takes more than this many times eager mode's time with the same length.
SLOW = 3

# Arguments of torch.compile; None: eager mode.
ENGINES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {"backend": "inductor", "dynamic": True},
    "inductor_from_static": {"backend": "inductor", "dynamic": None},
    "dynaxla": {"backend": "dynaxla", "dynamic": True},
    "dynaxla_from_static": {"backend": "dynaxla", "dynamic": None},
    "dynaxla_now": {"backend": "dynaxla", "dynamic": True, "options": {"compile": "now"}},
    "dynaxla_exact": {"backend": "dynaxla", "dynamic": True, "options": {"sizes": "exact", "compile": "now"}},
    "dynaxla_buckets": {"backend": "dynaxla", "dynamic": True, "options": {"sizes": "buckets", "compile": "now"}},
    "dynaxla_both": {"backend": "dynaxla", "dynamic": True, "options": {"sizes": "buckets", "compile": "background"}},
}


_LEGENDS = {
    "inductor": "Inductor with `dynamic=True`",
    "inductor_from_static": "Inductor with `dynamic=None`, so that the first graph has static sizes",
    "dynaxla": "dynaxla's defaults, with `dynamic=True`",
    "dynaxla_from_static": "dynaxla's defaults, with `dynamic=None`, so that the first graph has static sizes",
    "dynaxla_now": "`compile='now'`, with `dynamic=True`",
    "dynaxla_exact": "`sizes='exact'` and `compile='now'`, with `dynamic=True`",
    "dynaxla_buckets": "`sizes='buckets'` and `compile='now'`, with `dynamic=True`",
    "dynaxla_both": "`sizes='buckets'` and `compile='background'`, with `dynamic=True`",
}


class Gpt(nn.Module):
    """One GPT-2 block, with its embeddings."""

    def __init__(self) -> None:
        super().__init__()
        transformers = import_package("transformers")
        settings = {"n_layer": 1, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "use_cache": False}
        self.gpt = transformers.GPT2Model(transformers.GPT2Config(**settings))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gpt(tokens, return_dict=True).last_hidden_state


class Encoder(nn.Module):
    """A small transformer encoder, with its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, 96)
        layer = nn.TransformerEncoderLayer(96, 4, 384, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.layers(self.table(tokens))


VOCABULARY = 1000
_bert = partial(Bert, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=VOCABULARY)


@dataclass(frozen=True)
class Case:
    """A model, and how it is called.

    Attributes:
        build: creates the model.
        optimizer: the optimizer of a training step; "" for a forward pass.
        count: the number of different lengths.
    """

    build: Callable[[], nn.Module]
    optimizer: str = ""
    count: int = 100


CASES = {
    "encoder": Case(Encoder),
    "bert": Case(_bert),
    "gpt_block": Case(Gpt),
    "encoder_training": Case(Encoder, "sgd", 60),
    "bert_training": Case(_bert, "sgd"),
    "gpt_block_training": Case(Gpt, "sgd"),
}


def lengths(count: int) -> list[int]:
    """Returns different lengths in a random order. The second is 1, for which TorchDynamo captures a separate graph."""
    first, *others = random.Random(0).sample(range(2, LONGEST + 1), count - 1)
    return [first, 1, *others]


@dataclass(frozen=True)
class Times:
    """Seconds of calls, one for each length.

    Attributes:
        wall: the wall time.
        cpu: the CPU time of the calling thread.
    """

    wall: list[float]
    cpu: list[float]


@dataclass(frozen=True)
class Run:
    """One engine's calls.

    Attributes:
        first: the calls of the first round.
        again: the calls of the second round, after all compilations have ended.
        eager: eager mode's calls in turn with those of the second round.
        cpu: the CPU seconds of the process and its children for the first round, including work that other threads finish after the round.
        executables: the number of programs that dynaxla has compiled.
        disagreement: the first length whose result differs from eager mode's, with the difference; or "".
    """

    first: Times
    again: Times
    eager: Times
    cpu: float
    executables: int
    disagreement: str

    @staticmethod
    def of(fields: Mapping[str, Any]) -> Run:
        """Returns the run that has these fields, as JSON keeps them."""
        times = {name: Times(**fields[name]) for name in ("first", "again", "eager")}
        return Run(**{**fields, **times})

    @property
    def total(self) -> float:
        return sum(self.first.wall)

    @property
    def median(self) -> float:
        """The median wall time of a call after the `FIRST` calls."""
        return statistics.median(self.first.wall[FIRST:])

    def slow(self) -> list[float]:
        """Returns the wall times of slow calls after the `FIRST` calls."""
        pairs = list(zip(self.first.wall, self.eager.wall, strict=True))[FIRST:]
        return [mine for mine, theirs in pairs if mine > SLOW * theirs]


def ratio(times: Sequence[float], eager: Sequence[float]) -> float:
    """Returns the median of the ratios of calls' times to eager mode's with the same length, after the `FIRST` calls."""
    return statistics.median(mine / theirs for mine, theirs in list(zip(times, eager, strict=True))[FIRST:])


def engines(case: str) -> list[str]:
    """Returns the engines for a case. dynaxla_exact is left out in training: its hundred compilations take a quarter of an hour."""
    return [engine for engine in ENGINES if engine != "dynaxla_exact" or not CASES[case].optimizer]


def runs(names: Sequence[str], cells: Cells) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the fields of `Run` by case and engine. Without names, all cases. Raises: BenchmarkError for an unknown name."""
    unknown = sorted({*names} - CASES.keys())
    if unknown:
        raise BenchmarkError(f"no model {', '.join(map(repr, unknown))} called with many lengths; the valid names are: {', '.join(CASES)}")
    return {
        case: {engine: cells.measured(f"{case} {engine}", _run, engine, case) for engine in engines(case)}
        for case in CASES
        if not names or case in names
    }


def _run(engine: str, case: str) -> dict[str, Any]:
    return asdict(measure(engine, case))


def measure(engine: str, case: str) -> Run:
    """Measures a case in a fresh process with empty caches."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ,
            "DYNAXLA_CACHE": os.path.join(cache, "dynaxla"),
            "TORCHINDUCTOR_CACHE_DIR": cache,
            # Inductor's compilers then run one by one, as awaited child processes, so that their time can be counted.
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        }
        command = [sys.executable, "-m", "benchmarks.lengths", engine, case]
        done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return Run.of(json.loads(done.stdout.splitlines()[-1]))


def table(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Returns lines of Markdown. `found` is a result of `runs`."""
    counts = ", ".join(f"*{case}*: {CASES[case].count}" for case in found)
    shown = {engine: None for runs in found.values() for engine in runs}
    lines = [
        f"One call with each of several lengths up to {LONGEST}, in a random order, with empty caches. Each engine runs in a process of",
        f"its own. The number of lengths: {counts}.",
        "",
        "- *total*: seconds of all calls.",
        "- *CPU*: CPU seconds of the process and its children, until all background compilations have ended.",
        f"- *median*: milliseconds of a call. This column and the next three do not count the first {FIRST} calls.",
        "- *wall / eager*, *CPU / eager*: the time of a call divided by eager mode's time with the same length, as wall time and as CPU",
        "  time of the calling thread: the median over the calls.",
        f"- *slow*: the number of calls that take more than {SLOW} times eager mode's wall time, and the seconds of the slowest of them.",
        "- *again / eager*: the same as *CPU / eager*, for a second round with the same lengths, in which the engine and eager mode take",
        "  turns.",
        "- *executables*: the number of programs that XLA has compiled.",
        *(f"- *{engine}*: {_LEGENDS[engine]}." for engine in shown if engine in _LEGENDS),
        "",
        *tables.heading(["model", "engine", *_COLUMNS, "executables", "results"]),
    ]
    for case, engines in found.items():
        each = {engine: Run.of(run) for engine, run in engines.items()}
        theirs = each["inductor"]
        for engine, run in each.items():
            seconds = [f"{run.total:.2f}", f"{run.total / theirs.total:.2f}", f"{run.cpu:.2f}", f"{run.cpu / theirs.cpu:.2f}"]
            ratios = [ratio(run.first.wall, run.eager.wall), ratio(run.first.cpu, run.eager.cpu), ratio(run.again.cpu, run.eager.cpu)]
            wall, cpu, again = (f"{value:.2f}" for value in ratios)
            slow = run.slow()
            calls = [f"{run.median * 1e3:.1f}", wall, cpu, f"{len(slow)}, {max(slow):.2f}" if slow else "0", again]
            counted = str(run.executables) if engine.startswith("dynaxla") else ""
            lines.append(tables.line([case, engine, *seconds, *calls, counted, run.disagreement or "as eager's"]))
    return lines


_COLUMNS = ["total", "/ inductor", "CPU", "/ inductor", "median", "wall / eager", "CPU / eager", "slow", "again / eager"]


def _measure(engine: str, name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case, settings = CASES[name], ENGINES[engine]
    model = case.build()
    eager: Any = TrainingStep(model, case.optimizer) if case.optimizer else model.eval().requires_grad_(False)
    inputs = [torch.randint(0, VOCABULARY, (1, length)) for length in lengths(case.count)]
    with torch.no_grad():
        expected = [_kept(eager(tokens)) for tokens in inputs]
        call = eager
        before = cpu_seconds()
        if settings is not None:
            compile = partial(torch.compile, **settings)
            call = eager.with_compiled_model(compile) if case.optimizer else compile(model)
        first, found = _timed(call, inputs)
        finish = getattr(sys.modules.get("dynaxla"), "synchronize", lambda: None)
        finish()
        cpu, executables = cpu_seconds() - before, _executables()
        _timed(eager, inputs)
        in_turn = [(_timed(eager, [tokens]), _timed(call, [tokens])) for tokens in inputs]
    found_again = [found for _, (_, (found,)) in in_turn]
    wrong = [
        f"length {tokens.shape[1]}: {compared.detail or compared.error}"
        for results in (found, found_again)
        for tokens, mine, theirs in zip(inputs, results, expected, strict=True)
        if not (compared := agreement.compare(mine, theirs, gradients=bool(case.optimizer))).agrees
    ]
    run = Run(
        first, _joined([mine for _, (mine, _) in in_turn]), _joined([theirs for (theirs, _), _ in in_turn]),
        cpu, executables, wrong[0] if wrong else "",
    )  # fmt: skip
    return asdict(run)


def _timed(call: Callable[[torch.Tensor], Any], inputs: Sequence[torch.Tensor]) -> tuple[Times, list[Any]]:
    """Calls a model with each input. Returns: the times of the calls, and their results as `_kept` returns them."""
    times, found = Times([], []), []
    for tokens in inputs:
        start, start_cpu = time.perf_counter(), time.thread_time()
        result = call(tokens)
        times.cpu.append(time.thread_time() - start_cpu)
        times.wall.append(time.perf_counter() - start)
        found.append(_kept(result))
        del result
    return times, found


def _joined(times: Sequence[Times]) -> Times:
    return Times([seconds for each in times for seconds in each.wall], [seconds for each in times for seconds in each.cpu])


def _kept(result: Any) -> Any:
    """Returns the part of a result that is compared.

    Copies of all steps' gradients would fill the memory. Instead, four sums of each gradient's elements with random signs are kept: tensors
    with equal sums are almost certainly equal.
    """
    if not isinstance(result, tuple) or not isinstance(result[-1], list):
        return pytree.tree_map_only(torch.Tensor, torch.clone, result)
    loss, gradients = result
    return loss.clone(), [_signs(item.numel()) @ item.flatten() if item is not None else None for item in gradients]


@functools.cache
def _signs(count: int) -> torch.Tensor:
    return torch.randint(0, 2, (4, count), generator=torch.Generator().manual_seed(count)) * 2.0 - 1


def _executables() -> int:
    """Returns the number of programs that dynaxla has compiled."""
    if "dynaxla" not in sys.modules:
        return 0
    from dynaxla.observe import metrics

    return metrics.snapshot().get("compile", 0)


if __name__ == "__main__":
    print(json.dumps(_measure(*sys.argv[1:])))
