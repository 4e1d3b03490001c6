"""Calls of a model with many different lengths: `python -m benchmarks.lengths ENGINE CASE`, in a process of its own.

Every call is the first with its length: the cost of compilation shows in the calls themselves, or in another thread. Engines compile with
`dynamic=True`. Costs that eager mode has, too, are not counted: importing torch, building the model, first eager calls. One thread is used.
"""

from __future__ import annotations

import functools
import json
import os
import random
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
from dynaxla.bench.suites import Bert, _import
from dynaxla.bench.training import Training

from . import ROOT, tables
from .cells import Cells
from .second_start import cpu_seconds

COUNT, LONGEST = 100, 512
# The number of first calls that `Run.worst` ignores: an engine may still be busy with its first compilations.
FIRST = 10

# Arguments of torch.compile; None: eager mode.
ENGINES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {"backend": "inductor"},
    "dynaxla": {"backend": "dynaxla"},
    "dynaxla_exact": {"backend": "dynaxla", "options": {"sizes": "exact"}},
    "dynaxla_buckets": {"backend": "dynaxla", "options": {"sizes": "buckets"}},
    "dynaxla_background": {"backend": "dynaxla", "options": {"compile": "background"}},
    "dynaxla_both": {"backend": "dynaxla", "options": {"sizes": "buckets", "compile": "background"}},
}


class Gpt(nn.Module):
    """One GPT-2 block, with its embeddings."""

    def __init__(self) -> None:
        super().__init__()
        transformers = _import("transformers")
        settings = {"n_layer": 1, "vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "use_cache": False}
        self.gpt = transformers.GPT2Model(transformers.GPT2Config(**settings))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.gpt(tokens, return_dict=True).last_hidden_state


VOCABULARY = 1000
_bert = partial(Bert, hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, vocab_size=VOCABULARY)


@dataclass(frozen=True)
class Case:
    """A model.

    Attributes:
        build: creates the model.
        optimizer: the optimizer of a training step; "" for a forward pass.
    """

    build: Callable[[], nn.Module]
    optimizer: str = ""


CASES = {"bert": Case(_bert), "gpt_block": Case(Gpt), "bert_training": Case(_bert, "sgd"), "gpt_block_training": Case(Gpt, "sgd")}


def lengths() -> list[int]:
    """Returns different lengths in a random order. The second is 1, for which TorchDynamo captures a separate graph."""
    first, *others = random.Random(0).sample(range(2, LONGEST + 1), COUNT - 1)
    return [first, 1, *others]


@dataclass(frozen=True)
class Run:
    """One engine's calls, in seconds.

    Attributes:
        calls: the wall time of each call.
        cpu: the CPU time of all calls, of child processes, and of work that other threads finish after the last call.
        executables: the number of programs that dynaxla has compiled.
        disagreement: the first length whose result differs from eager mode's, with the difference; or "".
    """

    calls: list[float]
    cpu: float
    executables: int
    disagreement: str

    @property
    def total(self) -> float:
        return sum(self.calls)

    def worst(self, eager: Run) -> float:
        """Returns the largest ratio of a call's time to eager mode's with the same length, after the `FIRST` calls."""
        return max(mine / theirs for mine, theirs in list(zip(self.calls, eager.calls, strict=True))[FIRST:])


def engines(case: str) -> list[str]:
    """Returns the engines for a case. dynaxla_exact is left out in training: its hundred compilations take a quarter of an hour."""
    return [engine for engine in ENGINES if engine != "dynaxla_exact" or not CASES[case].optimizer]


def runs(names: Sequence[str], cells: Cells) -> dict[str, dict[str, dict[str, Any]]]:
    """Returns the fields of `Run` by case and engine. Without names, all cases. Raises: BenchmarkError for an unknown name."""
    unknown = sorted({*names} - CASES.keys())
    if unknown:
        raise BenchmarkError(f"no model {', '.join(map(repr, unknown))} called with many lengths; there are: {', '.join(CASES)}")
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
    return Run(**json.loads(done.stdout.splitlines()[-1]))


def table(found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> list[str]:
    """Returns lines of Markdown. `found` is a result of `runs`."""
    lines = [
        f"{COUNT} different lengths up to {LONGEST}, one call with each, in a random order; caches are empty. *Total*: seconds of all",
        "calls; *CPU*: of the whole process and its children, with what is compiled after the last. *Worst*: of a call behind the first",
        f"{FIRST}, over eager mode's with the same length. *dynaxla*: its default, four exact sizes and then buckets; *both*: buckets,",
        "compiled in the background.",
        "",
        *tables.heading(["model", "engine", "total", "/ inductor", "CPU", "/ inductor", "worst / eager", "executables", "results"]),
    ]
    for case, engines in found.items():
        each = {engine: Run(**run) for engine, run in engines.items()}
        theirs = each["inductor"]
        for engine, run in each.items():
            seconds = [f"{run.total:.2f}", f"{run.total / theirs.total:.2f}", f"{run.cpu:.2f}", f"{run.cpu / theirs.cpu:.2f}"]
            counted = str(run.executables) if engine.startswith("dynaxla") else ""
            worst = f"{run.worst(each['eager']):.2f}"
            lines.append(tables.line([case, engine, *seconds, worst, counted, run.disagreement or "as eager's"]))
    return lines


def _measure(engine: str, name: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    case, settings = CASES[name], ENGINES[engine]
    model = case.build()
    eager: Any = Training(model, case.optimizer) if case.optimizer else model.eval().requires_grad_(False)
    inputs = [torch.randint(0, VOCABULARY, (1, length)) for length in lengths()]
    with torch.no_grad():
        expected = [_kept(eager(tokens)) for tokens in inputs]
        call = eager
        before = cpu_seconds()
        if settings is not None:
            compile = partial(torch.compile, dynamic=True, **settings)
            call = eager.compiled(compile) if case.optimizer else compile(model)
        seconds, found = [], []
        for tokens in inputs:
            start = time.perf_counter()
            result = call(tokens)
            seconds.append(time.perf_counter() - start)
            found.append(_kept(result))
            del result
        finish = getattr(sys.modules.get("dynaxla"), "synchronize", lambda: None)
        finish()
        cpu = cpu_seconds() - before
    told = [agreement.compare(mine, theirs, gradients=bool(case.optimizer)) for mine, theirs in zip(found, expected, strict=True)]
    wrong = [f"length {length}: {item.detail or item.error}" for length, item in zip(lengths(), told, strict=True) if not item.agrees]
    return {"calls": seconds, "cpu": cpu, "executables": _executables(), "disagreement": wrong[0] if wrong else ""}


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
