"""The engine that dynaxla_auto chooses, compared with each engine alone: `make engines`.

`python -m commands.best_engine [MODELS] [--training]` measures some models only.

Each model is measured in three processes, with one thread and batch 1: each engine alone as a backend of torch.compile, then
`backend="dynaxla_auto"` after its choice, interleaved. Eager mode without torch.compile, which checks no guards, is measured too. Each
process makes its own choice; compiled programs are cached for the next process. The result is the process with the median ratio, because
the placement of memory alone makes a program up to a tenth slower in one process than in another. An interrupted run continues with stored
results. The table is docs/benchmarks/engines.md, with the data in engines.json. dynaxla_auto was developed without these models, except
for the ten models of the benchmark.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.cells import Cells
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks import suites, tables
from dynaxla.backend import dynaxla, dynaxla_auto
from dynaxla.bench import report
from dynaxla.bench.suites import make_model
from dynaxla.observe.engine_decisions import verdicts
from dynaxla.runtime import machine
from support.models import small_models
from support.paths import ROOT

PAGES = ROOT / "docs" / "benchmarks"
SINGLE = ("eager", "inductor", "dynaxla")
SHOWN = ("uncompiled", *SINGLE, "chosen")
TIMM = (
    "beit_base_patch16_224", "convnextv2_atto", "cspdarknet53", "davit_tiny", "dla34", "edgenext_xx_small", "efficientvit_b0",
    "fbnetv3_b", "gernet_s", "ghostnetv2_100", "hardcorenas_a", "mobilenetv4_conv_small", "mobilevit_xxs", "nf_resnet50",
    "poolformer_s12", "regnety_002", "repvgg_a0", "res2net50_26w_4s", "skresnet18", "tinynet_e",
)  # fmt: skip
TRANSFORMERS = (
    "BartModel", "CamembertModel", "DeiTModel", "ElectraModel", "GPTJModel", "Olmo2Model", "Qwen3Model", "RobertaModel", "T5Model",
    "Wav2Vec2Model",
)  # fmt: skip
# Lower bounds: of each model's ratio (see `ratio`), and of the geometric mean of all ratios.
LEAST, MEAN = 0.97, 1.0
_ROUNDS, _PROCESSES = 15, 3
# The maximum number of calls before a choice; seconds of a model's block of calls in each round.
_PATIENCE, _BLOCK = 1500, 0.05


def names() -> list[str]:
    """Returns the names of all models: the ten of the benchmark, small ones, 20 of timm and 10 of transformers."""
    return [case.name for case in (*suites.MODELS, *suites.SMALL)] + [*TIMM, *TRANSFORMERS]


def model_of(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """Returns a model for inference, and the positional and keyword arguments of a call with one sample."""
    torch.manual_seed(0)
    for case in (*suites.MODELS, *suites.SMALL):
        if case.name == name:
            model = make_model(case, 0, torch.float32, torch.device("cpu"))
            return model, case.inputs(1, torch.Generator().manual_seed(0)), {}
    model, (args, keywords) = small_models.timm_model(name) if name in TIMM else small_models.transformers_model(name)
    first = functools.partial(pytree.tree_map_only, torch.Tensor, lambda tensor: tensor[:1])
    return model.requires_grad_(False), first(args), first(keywords)


def measure(name: str, training: bool) -> dict[str, Any]:
    """Returns the milliseconds of a call by engine, and the engine chosen for each of the model's graphs."""
    torch.set_num_threads(1)
    model, args, keywords = model_of(name)
    model.requires_grad_(training)
    torch._dynamo.config.recompile_limit = 64
    callables: dict[str, Any] = {"uncompiled": model}
    for engine, backend in (("eager", "eager"), ("inductor", "inductor"), ("dynaxla", dynaxla), ("chosen", dynaxla_auto)):
        callables[engine] = torch.compile(model, backend=backend)
    calls = {engine: _call(callable_, args, keywords, training) for engine, callable_ in callables.items()}
    with torch.set_grad_enabled(training):
        for engine in SINGLE:
            for _ in range(3):
                calls[engine]()
        _settle(calls["chosen"])
        seconds = {engine: _seconds(call, 1) for engine, call in calls.items()}
        count = max(1, int(_BLOCK / min(seconds.values())))
        samples: dict[str, list[float]] = {engine: [] for engine in calls}
        order = list(calls)
        for number in range(_ROUNDS):
            for engine in order[number % len(order) :] + order[: number % len(order)]:
                calls[engine]()
                samples[engine].append(_seconds(calls[engine], count))
    if any(item["is_stored"] for item in verdicts()):
        raise RuntimeError("an earlier process has chosen: this one was to choose anew")
    return {
        "ms": {engine: statistics.fmean(sorted(times)[: _ROUNDS // 3]) * 1e3 for engine, times in samples.items()},
        "chosen": [item["chosen"] for item in verdicts()],
        "trials": [{engine: seconds * 1e3 for engine, seconds in item["seconds"].items()} for item in verdicts()],
        "left_out": {engine: reason for item in verdicts() for engine, reason in item["left_out"].items()},
    }


def _call(function: Any, args: tuple[Any, ...], keywords: dict[str, Any], training: bool) -> Callable[[], Any]:
    if not training:
        return lambda: function(*args, **keywords)

    def step() -> None:
        losses = [item for item in pytree.tree_leaves(function(*args, **keywords)) if isinstance(item, torch.Tensor) and item.requires_grad]
        sum(item.float().square().mean() for item in losses).backward()

    return step


def _settle(call: Callable[[], Any]) -> None:
    """Calls the function until no choice has been made for a while."""
    choices, calls_without_choice = 0, 0
    for _ in range(_PATIENCE):
        seconds = _seconds(call, 1)
        calls_without_choice = calls_without_choice + 1 if len(verdicts()) == choices and choices else 0
        choices = len(verdicts())
        if calls_without_choice > (700 if seconds < 0.005 else 150 if seconds < 0.02 else 60):  # fast graphs need more calls for a choice
            return


def _seconds(call: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def measured(name: str, training: bool) -> dict[str, Any]:
    """Measures a model in several processes; see `middle` for the result."""
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ, "DYNAXLA_CACHE": f"{cache}/dynaxla", "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "commands.best_engine", name, "--here", *["--training"] * training]
        for _ in range(_PROCESSES):
            process = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if process.returncode:
                return {"failure": (process.stderr.strip().splitlines() or ["it ended"])[-1][:300]}
            rows.append(dict(json.loads(process.stdout.splitlines()[-1])))
            if (choices := Path(cache, "dynaxla", "engines")).exists():  # absent if no graph may run twice
                shutil.rmtree(choices)
    return middle(rows)


def middle(measurements: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the measurement with the median ratio, with the ratios and choices of all measurements."""
    order = sorted(measurements, key=ratio)
    return {**order[len(order) // 2], "ratios": [ratio(row) for row in measurements], "choices": [row["chosen"] for row in measurements]}


def ratio(row: Mapping[str, Any]) -> float:
    """Returns the speed of the chosen engine relative to the best engine alone."""
    return float(min(row["ms"][engine] for engine in SINGLE) / row["ms"]["chosen"])


def chosen_engines(row: Mapping[str, Any]) -> str:
    """Returns the chosen engines; if the processes chose differently, the engines of each choice."""
    return "; ".join(dict.fromkeys(", ".join(sorted({*chosen})) for chosen in row["choices"]))


def page(rows: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str], training: bool) -> list[str]:
    """Returns the lines of the Markdown page."""
    good = {name: row for name, row in rows.items() if "failure" not in row}
    ratios = {name: ratio(row) for name, row in good.items()}
    kind = "forward and backward" if training else "inference"
    lines = [
        f"# The engine that dynaxla_auto chooses, compared with each engine: {kind}", "",
        "Made by `make engines`. Milliseconds of a call, the mean of the fastest third of rounds; batch 1, one thread.", "",
        "- *eager*, *inductor*, *dynaxla*: the model is compiled by this backend. *uncompiled*: without torch.compile.",
        '- *chosen*: `backend="dynaxla_auto"` after its choice, with the engines in the last column.',
        "- *ratio*: the time of the fastest of the other engines divided by that of *chosen*. The goals are a minimum of",
        f"  {LEAST} and a geometric mean of {MEAN}. *all*: the ratios of three processes. The row is the one with the middle ratio.", "",
        tables.circumstances(environment), "",
        *tables.heading(["model", *[f"{engine} ms" for engine in SHOWN], "ratio", "all", "engines"]),
    ]  # fmt: skip
    for name, row in rows.items():
        if "failure" in row:
            lines.append(tables.line([name, *["-"] * (len(SHOWN) + 2), f"failed: {row['failure']}"]))
            continue
        times = [f"{row['ms'][engine]:.4g}" for engine in SHOWN]
        lines.append(
            tables.line([name, *times, f"{ratios[name]:.2f}", " ".join(f"{each:.2f}" for each in row["ratios"]), chosen_engines(row)])
        )
    if ratios:
        blanks = [""] * len(SHOWN)
        lines.append(tables.line(["**geometric mean**", *blanks, f"**{tables.mean(list(ratios.values())):.3f}**", "", ""]))
        lines.append(tables.line(["**minimum**", *blanks, f"**{min(ratios.values()):.3f}**", "", ""]))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m commands.best_engine", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--training", action="store_true", help="forward and backward, instead of inference")
    parser.add_argument("--output", type=Path, default=PAGES, help="the folder of the page (default: docs/benchmarks)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if unknown := {*options.models} - {*names()}:
        parser.error(f"no model {', '.join(sorted(unknown))}; there are: {', '.join(names())}")
    if options.here:
        print(json.dumps(measure(options.models[0], options.training)))
        return 0
    environment = report.environment()
    stem = "engines-training" if options.training else "engines"
    cells = Cells(options.output / f".{stem}-cells.json", {**environment, "sources": machine.sources() or ""})
    rows = {}
    for name in options.models or names():
        rows[name] = cells.measured(name, measured, name, options.training)
        print(name, "failed" if "failure" in rows[name] else f"{ratio(rows[name]):.3f}", flush=True)
    text = "\n".join(page(rows, environment, options.training)) + "\n"
    (options.output / f"{stem}.md").write_text(text)
    (options.output / f"{stem}.json").write_text(json.dumps({"environment": environment, "models": rows}, indent=1) + "\n")
    if not options.models:
        cells.done()
    ratios = [ratio(row) for row in rows.values() if "failure" not in row]
    return int(len(ratios) < len(rows) or min(ratios) < LEAST or tables.mean(ratios) < MEAN)


if __name__ == "__main__":
    sys.exit(main())
