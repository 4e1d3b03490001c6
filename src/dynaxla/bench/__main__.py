"""The command: `dynaxla bench`, or `python -m dynaxla.bench`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .. import tuning
from . import engines as engine_table
from . import report, suites
from .errors import BenchmarkError
from .measure import Settings, measure, prepared_process, rehearse
from .runner import Placement
from .training import OPTIMIZERS

DTYPES = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}

QUICK_SECONDS = 2.0


def _list(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


_MODELS = _list("Models, by comma or repeated. Default: all of the suite.", "--models", "--only")
_ENGINES = _list(
    f"By comma or repeated: {', '.join(engine_table.ENGINES)}. Default: all that work here, without tuned, frozen, step, and the last two."
)
_SECONDS = typer.Option(min=0.0, help="Timing for each engine of a model. Default: 3.", show_default=False)
Batch = Annotated[int, typer.Option(min=1, help="Batch size.")]
Dtype = Annotated[str, typer.Option(help=f"Of weights and inputs: {', '.join(DTYPES)}.")]
Device = Annotated[str, typer.Option(help="A torch device: cpu, cuda, cuda:1.")]
Threads = Annotated[int, typer.Option(min=1, help="Threads of torch, and of XLA's CPU pool if JAX has not started.")]
_MEMORY = typer.Option("--memory", help="Measure peak memory, each engine in a process of its own: takes twice as long.")


def bench(
    models: Annotated[list[str] | None, _MODELS] = None,
    suite: Annotated[str, typer.Option(help=f"Which models: {', '.join(suites.SUITES)} (the last ones break graphs).")] = "models",
    engines: Annotated[list[str] | None, _ENGINES] = None,
    training: Annotated[bool, typer.Option("--training", help="Whole training steps instead of inference.")] = False,
    optimizer: Annotated[str, typer.Option(help=f"With --training: {', '.join(OPTIMIZERS)}.")] = "sgd",
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size. Default: 1, with --training 4.", show_default=False)] = None,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    iterations_per_run: Annotated[int, typer.Option(min=1, help="Calls timed together, with one wait for the device at their end.")] = 1,
    randomize_input: Annotated[bool, typer.Option("--randomize-input", help="A fresh random input for each call.")] = False,
    baseline: Annotated[str, typer.Option(help="The engine whose speed is 1.00.")] = "eager",
    threads: Threads = 1,
    quick: Annotated[bool, typer.Option("--quick", help="A few small models, four engines, few rounds: a few minutes.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed rounds, instead of --seconds.", show_default=False)] = None,
    seconds: Annotated[float | None, _SECONDS] = None,
    memory: Annotated[bool, _MEMORY] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Also dynaxla with measured forms, and a table of what was tried.")] = False,
    output: Annotated[Path | None, typer.Option(help="A directory for JSON, Markdown and a plot.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="For weights and inputs.")] = 0,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print failures in full.")] = False,
) -> None:
    """Time models in eager PyTorch, Inductor, TorchScript and dynaxla, and check that all agree.

    The exit code is 1 if a model fails or disagrees with eager in any engine, 2 for a request that cannot be met.
    """
    console = Console()
    try:
        if optimizer not in OPTIMIZERS:
            raise BenchmarkError(f"no optimizer {optimizer!r}; there are: {', '.join(OPTIMIZERS)}")
        batch = batch or (4 if training else 1)
        placement = Placement(batch, check_dtype(dtype), check_device(device), seed, threads, optimizer if training else "")
        names = split(models) or (suites.QUICK.get(suite, []) if quick else [])
        cases = suites.choose(suite, names)
        engine_table.choose([baseline], [])
        usual = (
            engine_table.TRAINING
            if training
            else engine_table.QUICK
            if quick
            else engine_table.USUAL.get(suite, list(engine_table.ENGINES))
        )
        more = [baseline, "dynaxla_tuned"] if tune else [baseline]
        chosen, notes = engine_table.choose(_with(split(engines), more), _with(usual, more))
        budget = seconds if seconds is not None else QUICK_SECONDS if quick else Settings.seconds
        settings = Settings(placement, iterations_per_run, randomize_input, baseline, rounds, budget, memory, traceback)
        if output is not None:
            check_writable(output)
        result = run(cases, chosen, settings, suite, notes)
        console = console if console.is_terminal else Console(width=200)
        report.show(result, console)
        if tune:
            tuning.show(tuning.tried(), console)
        if output is not None:
            for file in report.write(result, output):
                console.print(f"wrote {file}", highlight=False)
    except BenchmarkError as error:
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if result.bad_rows or not result.rows:
        raise typer.Exit(1)


def run(
    cases: list[suites.Case], chosen: list[engine_table.Engine], settings: Settings, suite: str, notes: list[str] | None = None
) -> report.Report:
    """Measure, with a progress bar on stderr. Stopped with Ctrl-C, it reports what it has."""
    result = report.Report(suite, settings, [engine.name for engine in chosen], list(notes or []))
    with prepared_process(settings.placement.threads) as more, Bar(len(cases)) as bar:
        result.notes += more
        try:
            bar.say("starting the engines")
            rehearse(chosen, settings.placement)
            for case in cases:
                result.models.append(measure(case, chosen, settings, bar))
        except KeyboardInterrupt:
            result.notes.append(f"Interrupted: {len(result.models)} of {len(cases)} models measured.")
    return result


class Bar:
    """A bar over all models; each counts the same."""

    def __init__(self, models: int) -> None:
        percentage = TextColumn("{task.percentage:>3.0f}%")
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), percentage, TimeElapsedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task("", total=models)
        self._begun = 0
        self._model = ""
        self._steps = 1.0

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def begin(self, model: str, steps: int) -> None:
        self._progress.update(self._task, completed=self._begun)
        self._model, self._steps = model, steps
        self._begun += 1

    def step(self, text: str, steps: float = 1) -> None:
        self._progress.update(self._task, description=f"{self._model}: {text}", advance=steps / self._steps)


def split(names: Iterable[str] | None) -> list[str]:
    return [name.strip() for part in names or () for name in part.split(",") if name.strip()]


def _with(names: list[str], more: Iterable[str]) -> list[str]:
    """These names and more; none if there are none, which means the usual ones."""
    return [*names, *more] if names else []


def check_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise BenchmarkError(f"no dtype {name!r}; there are: {', '.join(DTYPES)}")
    return DTYPES[name]


def check_device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise BenchmarkError(f"no device {name!r}; there are: cpu, cuda, cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise BenchmarkError(f"dynaxla does not run on the device {name!r}; there are: cpu, cuda, cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BenchmarkError(f"torch finds no device {name!r} here: it sees {torch.cuda.device_count()} CUDA devices")
    return device


def check_writable(directory: Path) -> None:
    """Before the measurements, not after them."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe = directory / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise BenchmarkError(f"cannot write to {directory}: {error}") from error


def main() -> None:
    typer.run(bench)


if __name__ == "__main__":
    main()
