"""The engine that dynaxla_auto chooses, compared with each engine alone: `make engines`.

`python -m commands.best_engine [MODELS] [--training]` measures some models only.

Each model is measured in three processes, with one thread and batch 1: each engine alone as a backend of torch.compile, then
`backend="dynaxla_auto"` after its choice, interleaved. Eager mode without torch.compile, which checks no guards, is measured too. Each
process chooses anew; compiled programs are kept for the next process. The result is the process with the median ratio, because the
placement of memory alone makes a program up to a tenth slower in one process than in another. Results are kept, and an interrupted run
continues. The table is docs/benchmarks/engines.md, with the data in engines.json. Except for the ten models of the benchmark, no model was
looked at while dynaxla_auto was developed.
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
# What the engine that is chosen may lose, and what it must gain on the whole.
LEAST, MEAN = 0.97, 1.0
_ROUNDS, _PROCESSES = 15, 3
# Calls within which a choice has to be made; seconds of a model's blocks in each round.
_PATIENCE, _BLOCK = 1500, 0.05


def names() -> list[str]:
    """Of all models: the ten, small ones, and 20 and 10 of timm's and transformers'."""
    return [case.name for case in (*suites.MODELS, *suites.SMALL)] + [*TIMM, *TRANSFORMERS]


def model_of(name: str) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    """A model for inference, and the arguments of its calls, of one sample."""
    torch.manual_seed(0)
    for case in (*suites.MODELS, *suites.SMALL):
        if case.name == name:
            model = make_model(case, 0, torch.float32, torch.device("cpu"))
            return model, case.inputs(1, torch.Generator().manual_seed(0)), {}
    model, (args, keywords) = small_models.timm_model(name) if name in TIMM else small_models.transformers_model(name)
    first = functools.partial(pytree.tree_map_only, torch.Tensor, lambda tensor: tensor[:1])
    return model.requires_grad_(False), first(args), first(keywords)


def measure(name: str, training: bool) -> dict[str, Any]:
    """Milliseconds of a call by engine, and who was chosen for each of the model's graphs."""
    torch.set_num_threads(1)
    model, args, keywords = model_of(name)
    model.requires_grad_(training)
    torch._dynamo.config.recompile_limit = 64
    forms: dict[str, Any] = {"uncompiled": model}
    for engine, backend in (("eager", "eager"), ("inductor", "inductor"), ("dynaxla", dynaxla), ("chosen", dynaxla_auto)):
        forms[engine] = torch.compile(model, backend=backend)
    calls = {engine: _call(form, args, keywords, training) for engine, form in forms.items()}
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
    if any(item["kept"] for item in verdicts()):
        raise RuntimeError("an earlier process has chosen: this one was to choose anew")
    return {
        "ms": {engine: statistics.fmean(sorted(found)[: _ROUNDS // 3]) * 1e3 for engine, found in samples.items()},
        "chosen": [item["chosen"] for item in verdicts()],
        "trials": [{engine: seconds * 1e3 for engine, seconds in item["seconds"].items()} for item in verdicts()],
        "left_out": {engine: reason for item in verdicts() for engine, reason in item["left_out"].items()},
    }


def _call(form: Any, args: tuple[Any, ...], keywords: dict[str, Any], training: bool) -> Callable[[], Any]:
    if not training:
        return lambda: form(*args, **keywords)

    def step() -> None:
        found = [item for item in pytree.tree_leaves(form(*args, **keywords)) if isinstance(item, torch.Tensor) and item.requires_grad]
        sum(item.float().square().mean() for item in found).backward()

    return step


def _settle(call: Callable[[], Any]) -> None:
    """Call until no choice has been made for a while."""
    found, quiet = 0, 0
    for _ in range(_PATIENCE):
        seconds = _seconds(call, 1)
        quiet = quiet + 1 if len(verdicts()) == found and found else 0
        found = len(verdicts())
        if quiet > (700 if seconds < 0.005 else 150 if seconds < 0.02 else 60):  # blocks of a quick graph have more calls
            return


def _seconds(call: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def measured(name: str, training: bool) -> dict[str, Any]:
    """Of several processes, what the one with the middle ratio has found, and all ratios and choices."""
    found = []
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            **os.environ, "DYNAXLA_CACHE": f"{cache}/dynaxla", "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "commands.best_engine", name, "--here", *["--training"] * training]
        for _ in range(_PROCESSES):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                return {"failure": (done.stderr.strip().splitlines() or ["it ended"])[-1][:300]}
            found.append(dict(json.loads(done.stdout.splitlines()[-1])))
            if (choices := Path(cache, "dynaxla", "engines")).exists():  # there are none of graphs that are not to be run twice
                shutil.rmtree(choices)
    return middle(found)


def middle(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the measurements of a model, the one with the middle ratio; with the others' ratios and choices."""
    order = sorted(found, key=ratio)
    return {**order[len(order) // 2], "ratios": [ratio(row) for row in found], "choices": [row["chosen"] for row in found]}


def ratio(row: Mapping[str, Any]) -> float:
    """How many times as fast as the best engine alone the chosen one is."""
    return float(min(row["ms"][engine] for engine in SINGLE) / row["ms"]["chosen"])


def who(row: Mapping[str, Any]) -> str:
    """The engines that were chosen; where processes differ, what each of them chose."""
    return "; ".join(dict.fromkeys(", ".join(sorted({*chosen})) for chosen in row["choices"]))


def page(rows: Mapping[str, Mapping[str, Any]], environment: Mapping[str, str], training: bool) -> list[str]:
    """Lines of Markdown."""
    good = {name: row for name, row in rows.items() if "failure" not in row}
    ratios = {name: ratio(row) for name, row in good.items()}
    what = "forward and backward" if training else "inference"
    lines = [
        f"# The engine that is chosen, beside each alone: {what}", "",
        "Milliseconds of a call, the mean of the quickest third of rounds; batch 1, one thread.",
        "*Eager*, *inductor*, *dynaxla*: as backends of torch.compile; *uncompiled*: without torch.compile;",
        '*chosen*: `backend="dynaxla_auto"` after its choice. *Ratio*: the best engine alone over the chosen one;',
        f"it should be {LEAST} at least, and {MEAN} in the geometric mean. Of three processes, the one with the",
        "middle ratio; *all*: of all three. Made by `make engines`.", "",
        tables.circumstances(environment), "",
        *tables.heading(["model", *[f"{engine} ms" for engine in SHOWN], "ratio", "all", "who"]),
    ]  # fmt: skip
    for name, row in rows.items():
        if "failure" in row:
            lines.append(tables.line([name, *["-"] * (len(SHOWN) + 2), f"failed: {row['failure']}"]))
            continue
        times = [f"{row['ms'][engine]:.4g}" for engine in SHOWN]
        lines.append(tables.line([name, *times, f"{ratios[name]:.2f}", " ".join(f"{each:.2f}" for each in row["ratios"]), who(row)]))
    if ratios:
        blanks = [""] * len(SHOWN)
        lines.append(tables.line(["**geometric mean**", *blanks, f"**{tables.mean(list(ratios.values())):.3f}**", "", ""]))
        lines.append(tables.line(["**least**", *blanks, f"**{min(ratios.values()):.3f}**", "", ""]))
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m commands.best_engine", description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="default: all")
    parser.add_argument("--training", action="store_true", help="forward and backward, instead of inference")
    parser.add_argument("--output", type=Path, default=PAGES, help="the folder of the page (default: docs/benchmarks)")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if unknown := {*given.models} - {*names()}:
        parser.error(f"no model {', '.join(sorted(unknown))}; there are: {', '.join(names())}")
    if given.here:
        print(json.dumps(measure(given.models[0], given.training)))
        return 0
    environment = report.environment()
    stem = "engines-training" if given.training else "engines"
    cells = Cells(given.output / f".{stem}-cells.json", {**environment, "sources": machine.sources() or ""})
    rows = {}
    for name in given.models or names():
        rows[name] = cells.measured(name, measured, name, given.training)
        print(name, "failed" if "failure" in rows[name] else f"{ratio(rows[name]):.3f}", flush=True)
    text = "\n".join(page(rows, environment, given.training)) + "\n"
    (given.output / f"{stem}.md").write_text(text)
    (given.output / f"{stem}.json").write_text(json.dumps({"environment": environment, "models": rows}, indent=1) + "\n")
    if not given.models:
        cells.done()
    ratios = [ratio(row) for row in rows.values() if "failure" not in row]
    return int(len(ratios) < len(rows) or min(ratios) < LEAST or tables.mean(ratios) < MEAN)


if __name__ == "__main__":
    sys.exit(main())
