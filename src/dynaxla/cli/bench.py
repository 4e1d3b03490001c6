"""`dynaxla bench` (the package dynaxla.bench measures), and the commands that need the source tree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..bench import choices, from_source_tree
from ..bench.argument_checks import (
    check_device,
    check_device_name,
    check_dtype,
    check_names,
    check_writable,
    split_at_commas,
    with_extra_names,
)
from ..bench.benchmark_error import BenchmarkError
from .terminal import console_for

if TYPE_CHECKING:
    from ..bench.report import BenchReport

QUICK_SECONDS = 2.0
SOURCE_TREE = "git clone dynaxla, and run the command there (pip install -e '.[bench]')"


def _optional(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


_MODELS = _optional("Models, separated by commas, or the option repeated. Default: all of the suite.", "--models", "--only")
_ENGINES = _optional(f"Like --models, of: {', '.join(choices.ENGINES)}. Default: most that work here. The source tree has more.")
_OPTIMIZER = typer.Option(help=f"With --training: {', '.join(choices.OPTIMIZERS)} (the forward and backward pass alone).")
_SECONDS = typer.Option(min=0.0, help="Timing for each engine of a model. Default: 3.", show_default=False)
Batch = Annotated[int, typer.Option(min=1, help="Batch size.")]
Dtype = Annotated[str, typer.Option(help=f"Of weights and inputs: {', '.join(choices.DTYPES)}.")]
Device = Annotated[str, typer.Option(help="A torch device: cpu, cuda, cuda:1.")]
_DEVICE = typer.Option(help="A torch device: cpu, cuda, cuda:1, jax, jax:1. On jax, results are compared with eager mode on the CPU.")
_AMORTIZED = typer.Option(min=0, help="Also time this many calls with one wait at their end. Default: 0, on jax 10.", show_default=False)
Threads = Annotated[int, typer.Option(min=1, help="Threads of torch, and of XLA's CPU pool if JAX has not started.")]
_MEMORY = typer.Option("--memory", help="Measure peak memory, each engine in its own process (needs the source tree).")


@contextlib.contextmanager
def exit_on_errors(*error_types: type[Exception]) -> Iterator[None]:
    """Prints to stderr an error about a request that cannot be met, and exits with code 2.

    Args:
        error_types: the exception types of such errors, in addition to BenchmarkError.
    """
    caught: tuple[type[Exception], ...] = (BenchmarkError, *error_types)
    try:
        yield
    except caught as error:
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from None


def bench(
    models: Annotated[list[str] | None, _MODELS] = None,
    suite: Annotated[str, typer.Option(help="Which models: models; in the source tree also others.")] = "models",
    engines: Annotated[list[str] | None, _ENGINES] = None,
    training: Annotated[bool, typer.Option("--training", help="Whole training steps instead of inference.")] = False,
    optimizer: Annotated[str, _OPTIMIZER] = "sgd",
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size. Default: 1, with --training 4.", show_default=False)] = None,
    dtype: Dtype = "float32",
    device: Annotated[str, _DEVICE] = "cpu",
    iterations_per_run: Annotated[int, typer.Option(min=1, help="Calls timed together, with one wait for the device at their end.")] = 1,
    amortized: Annotated[int | None, _AMORTIZED] = None,
    randomize_input: Annotated[bool, typer.Option("--randomize-input", help="A fresh random input for each call.")] = False,
    baseline: Annotated[str, typer.Option(help="The engine whose speed is 1.00.")] = "eager",
    threads: Threads = 1,
    quick: Annotated[bool, typer.Option("--quick", help="A few small models, four engines, few rounds: a few minutes.")] = False,
    rounds: Annotated[int | None, typer.Option(min=1, help="Timed rounds, instead of --seconds.", show_default=False)] = None,
    seconds: Annotated[float | None, _SECONDS] = None,
    memory: Annotated[bool, _MEMORY] = False,
    tune: Annotated[bool, typer.Option("--tune", help="Also dynaxla with measured implementations, and a table of them.")] = False,
    output: Annotated[Path | None, typer.Option(help="A directory for JSON, Markdown and a plot.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="For weights and inputs.")] = 0,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print failures in full.")] = False,
) -> None:
    """Time models in eager PyTorch, Inductor, TorchScript and dynaxla, and check that all agree.

    The exit code is 1 if a model fails or disagrees with eager in any engine, 2 for a request that cannot be met.
    """
    with exit_on_errors():  # before torch and JAX are imported
        _check_arguments(suite, split_at_commas(models), [*split_at_commas(engines), baseline], optimizer, dtype, device, memory, output)

    from ..bench import engines as standard_engines
    from ..bench import suites as standard_models
    from ..bench.measure import BenchSettings
    from ..bench.runner import ModelSetup
    from ..bench.session import run

    engine_table, suites = from_source_tree("engines") or standard_engines, from_source_tree("suites") or standard_models
    processes = from_source_tree("processes") if memory else None
    with exit_on_errors():
        batch = batch or (4 if training else 1)
        setup = ModelSetup(batch, check_dtype(dtype), check_device(device, threads), seed, threads, optimizer if training else "")
        device_type = setup.device.type
        cases = suites.choose(suite, split_at_commas(models) or (suites.QUICK.get(suite, []) if quick else []))
        engine_table.choose([baseline], [], device_type)
        default_names = engine_table.default_engines(suite, device_type, training=training, quick=quick)
        extra_names = [baseline, "dynaxla_tuned"] if tune else [baseline]
        chosen, notes = engine_table.choose(
            with_extra_names(split_at_commas(engines), extra_names), with_extra_names(default_names, extra_names), device_type
        )
        amortized_calls = amortized if amortized is not None else 10 if device_type == "jax" else 0
        seconds_per_engine = seconds if seconds is not None else QUICK_SECONDS if quick else BenchSettings.seconds
        measure_memory = None if processes is None else processes.measure_memory
        settings = BenchSettings(
            setup, iterations_per_run, randomize_input, baseline, rounds, seconds_per_engine, measure_memory, traceback, amortized_calls
        )
        result = run(cases, chosen, settings, suite, notes)
        _report(result, tune, output)
    if result.bad_rows or not result.rows:
        raise typer.Exit(1)


def _check_arguments(
    suite: str, models: list[str], engines: list[str], optimizer: str, dtype: str, device: str, memory: bool, output: Path | None
) -> None:
    """Checks arguments of `bench`, without importing torch and JAX. Raises: BenchmarkError."""
    table: Any = from_source_tree("choices") or choices
    check_names("suite", [suite], table.SUITES)
    check_names("engine", engines, table.ENGINES)
    check_names("model", sorted(models) if suite == "models" else [], choices.MODELS, " in the suite 'models'")
    check_names("optimizer", [optimizer], choices.OPTIMIZERS)
    check_names("dtype", [dtype], choices.DTYPES)
    check_device_name(device, with_jax=True)
    if memory and table is choices:
        raise BenchmarkError(f"--memory is part of the source tree alone: {SOURCE_TREE}")
    if memory and device.startswith("jax"):
        raise BenchmarkError("--memory supports only the devices cpu and cuda")
    if output is not None:
        check_writable(output)


def _report(result: BenchReport, tune: bool, output: Path | None) -> None:
    """Prints a result, with --tune also the measured implementations, and writes it to the directory `output`."""
    from ..bench import report
    from ..tuning import measurements
    from ..tuning.table import show

    console = console_for(200)
    report.show(result, console)
    if tune:
        show(measurements(), console)
    for file in report.write(result, output) if output is not None else ():
        console.print(f"wrote {file}", highlight=False)


def table_command(name: str, part: str) -> Callable[[typer.Context], None]:
    """Returns the command `dynaxla NAME`, which runs `python -m benchmarks PART`. Without the source tree, the command reports an error."""

    def command(context: typer.Context) -> None:
        tables = from_source_tree("__main__")
        with exit_on_errors():
            if tables is None:
                raise BenchmarkError(f"the tables of {name} are part of the source tree alone: {SOURCE_TREE}")
        typer.main.get_command(tables.app)([part, *context.args], prog_name="python -m benchmarks")

    command.__doc__ = f"Run `python -m benchmarks {part}`, whose --help lists the options. It needs the source tree."
    return command
