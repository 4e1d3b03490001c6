"""The arguments of `dynaxla bench`, `bench-cpu`, `bench-gpu`, `bench-device` and `overhead`. The measurements are in dynaxla.bench."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..bench import choices as known
from ..bench.benchmark_error import BenchmarkError

QUICK_SECONDS = 2.0


def _list(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, show_default=False)


_MODELS = _list("Models, by comma or repeated. Default: all of the suite.", "--models", "--only")
_ENGINES = _list(
    f"By comma or repeated: {', '.join(known.ENGINES)}. Default: all that work here, without tuned, frozen, step, and the last two."
)
_SECONDS = typer.Option(min=0.0, help="Timing for each engine of a model. Default: 3.", show_default=False)
Batch = Annotated[int, typer.Option(min=1, help="Batch size.")]
Dtype = Annotated[str, typer.Option(help=f"Of weights and inputs: {', '.join(known.DTYPES)}.")]
Device = Annotated[str, typer.Option(help="A torch device: cpu, cuda, cuda:1.")]
_DEVICE = typer.Option(help="A torch device: cpu, cuda, cuda:1, jax, jax:1. On jax, results are compared with eager mode on the CPU.")
_AMORTIZED = typer.Option(min=0, help="Also time this many calls with one wait at their end. Default: 0, on jax 10.", show_default=False)
Threads = Annotated[int, typer.Option(min=1, help="Threads of torch, and of XLA's CPU pool if JAX has not started.")]
_MEMORY = typer.Option("--memory", help="Measure peak memory, each engine in its own process: takes twice as long.")


@contextlib.contextmanager
def bad_requests_shown(*kinds: type[Exception]) -> Iterator[None]:
    """Prints errors about requests that cannot be met on stderr, and exits with code 2.

    Args:
        kinds: the exception types of such errors, besides BenchmarkError.
    """
    shown: tuple[type[Exception], ...] = (BenchmarkError, *kinds)
    try:
        yield
    except shown as error:
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from None


def bench(
    models: Annotated[list[str] | None, _MODELS] = None,
    suite: Annotated[str, typer.Option(help=f"Which models: {', '.join(known.SUITES)} (the last ones break graphs).")] = "models",
    engines: Annotated[list[str] | None, _ENGINES] = None,
    training: Annotated[bool, typer.Option("--training", help="Whole training steps instead of inference.")] = False,
    optimizer: Annotated[
        str, typer.Option(help=f"With --training: {', '.join(known.OPTIMIZERS)} (the forward and backward pass alone).")
    ] = "sgd",
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
    tune: Annotated[bool, typer.Option("--tune", help="Also dynaxla with measured forms, and a table of the measured forms.")] = False,
    output: Annotated[Path | None, typer.Option(help="A directory for JSON, Markdown and a plot.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="For weights and inputs.")] = 0,
    traceback: Annotated[bool, typer.Option("--traceback", help="Print failures in full.")] = False,
) -> None:
    """Time models in eager PyTorch, Inductor, TorchScript and dynaxla, and check that all agree.

    The exit code is 1 if a model fails or disagrees with eager in any engine, 2 for a request that cannot be met.
    """
    from ..bench import engines as engine_table
    from ..bench import report, suites
    from ..bench.measure import Settings
    from ..bench.requests import check_device, check_dtype, check_writable, split, with_more
    from ..bench.runner import Placement
    from ..bench.session import run
    from ..tuning import tried
    from ..tuning.table import show

    console = Console()
    with bad_requests_shown():
        if optimizer not in known.OPTIMIZERS:
            raise BenchmarkError(f"there is no optimizer {optimizer!r}; the optimizers are: {', '.join(known.OPTIMIZERS)}")
        batch = batch or (4 if training else 1)
        placement = Placement(batch, check_dtype(dtype), check_device(device, threads), seed, threads, optimizer if training else "")
        kind = placement.device.type
        if kind == "jax" and memory:
            raise BenchmarkError("--memory supports only the devices cpu and cuda")
        names = split(models) or (suites.QUICK.get(suite, []) if quick else [])
        cases = suites.choose(suite, names)
        engine_table.choose([baseline], [], kind)
        usual = engine_table.usual_ones(suite, kind, training=training, quick=quick)
        more = [baseline, "dynaxla_tuned"] if tune else [baseline]
        chosen, notes = engine_table.choose(with_more(split(engines), more), with_more(usual, more), kind)
        several = amortized if amortized is not None else 10 if kind == "jax" else 0
        budget = seconds if seconds is not None else QUICK_SECONDS if quick else Settings.seconds
        settings = Settings(placement, iterations_per_run, randomize_input, baseline, rounds, budget, memory, traceback, several)
        if output is not None:
            check_writable(output)
        result = run(cases, chosen, settings, suite, notes)
        console = console if console.is_terminal else Console(width=200)
        report.show(result, console)
        if tune:
            show(tried(), console)
        if output is not None:
            for file in report.write(result, output):
                console.print(f"wrote {file}", highlight=False)
    if result.bad_rows or not result.rows:
        raise typer.Exit(1)


_PARTS = typer.Argument(help=f"Of: {', '.join(known.PARTS)}. Default: all.", show_default=False)


def bench_cpu(
    parts: Annotated[list[str] | None, _PARTS] = None,
    output: Annotated[
        Path, typer.Option(help="The directory of cpu.md, cpu.json and ops.md. Parts that are there already are kept.")
    ] = Path("."),
    models: Annotated[list[str] | None, typer.Option(help="Only these models, by comma or repeated.", show_default=False)] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Timing for each engine of a model.")] = 2.0,
) -> None:
    """Compare dynaxla with eager mode and Inductor on the CPU, and write the tables as cpu.md, and those of single ops as ops.md.

    All parts together take more than three hours.

    The exit code is 1 if a model fails or disagrees with eager, 2 for a request that cannot be met.
    """
    from ..bench import cpu
    from ..bench.requests import split

    with bad_requests_shown():
        good = cpu.write(split(parts), output, split(models), seconds)
    asked = set(split(parts) or known.PARTS)
    for page in [*(["cpu.md"] if asked - {known.OPS} else []), *(["ops.md"] if known.OPS in asked else [])]:
        Console().print((output / page).read_text(), markup=False, highlight=False)
    if not good:
        raise typer.Exit(1)


_GPU_PARTS = typer.Argument(
    help="PRECISION-batchN, behind it -training, -autotuned or both: PRECISION is float32, tf32 or bfloat16, N 1 or 32. Default: all.",
    show_default=False,
)


def bench_gpu(
    parts: Annotated[list[str] | None, _GPU_PARTS] = None,
    output: Annotated[Path, typer.Option(help="The directory of gpu.md and gpu.json. What is in them already is kept.")] = Path("."),
    models: Annotated[list[str] | None, typer.Option(help="Only these models, by comma or repeated.", show_default=False)] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Timing for each engine of a model.")] = 2.0,
    minutes: Annotated[float, typer.Option(min=0.0, help="When to stop. The same command goes on where it stopped.")] = 9.0,
    jobs: Annotated[int, typer.Option(min=1, help="Models that compile at once. They are timed one after the other.")] = 6,
    device: Device = "cuda",
) -> None:
    """Compare dynaxla with eager mode and Inductor on a GPU, and write the tables as gpu.md. All parts together take hours.

    The exit code is 1 if a model fails, disagrees with eager or is not measured yet, 2 for a request that cannot be met.
    """
    from ..bench import gpu
    from ..bench.requests import split

    with bad_requests_shown():
        good = gpu.write(split(parts), output, split(models), seconds, minutes, device, jobs)
    Console().print((output / "gpu.md").read_text(), markup=False, highlight=False, soft_wrap=True)
    if not good:
        raise typer.Exit(1)


_DEVICE_PARTS = typer.Argument(help=f"Of: {', '.join(known.DEVICE_PARTS)}. Default: all.", show_default=False)


def bench_device(
    parts: Annotated[list[str] | None, _DEVICE_PARTS] = None,
    output: Annotated[Path, typer.Option(help="The directory of device.md and device.json. What is in them already is kept.")] = Path("."),
    models: Annotated[list[str] | None, typer.Option(help="Only these models, by comma or repeated.", show_default=False)] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Timing for each engine of a model.")] = 1.0,
    minutes: Annotated[float, typer.Option(min=0.0, help="When no further model is begun. The same command goes on there.")] = 7.0,
    device: Annotated[str, typer.Option(help="jax, or jax:N.")] = "jax",
) -> None:
    """Compare graphs traced once with lazy and eager mode on the device "jax", and with CPU tensors, and write the tables as device.md.

    The exit code is 1 if a model fails, disagrees with eager or is not measured yet, 2 for a request that cannot be met.
    """
    from ..bench import device_jax
    from ..bench.requests import split

    with bad_requests_shown():
        good = device_jax.write(split(parts), output, split(models), seconds, minutes, device)
    Console().print((output / "device.md").read_text(), markup=False, highlight=False, soft_wrap=True)
    if not good:
        raise typer.Exit(1)


def overhead(
    layers: Annotated[list[int] | None, typer.Option(help="Layers of the perceptron; repeat for several. Default: 2 and 50.")] = None,
    width: Annotated[int, typer.Option(min=1, help="Its width.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of 100 calls.")] = 60,
) -> None:
    """Measure the overhead of a call beyond XLA's own execution, on one thread.

    The exit code is 1 if dynaxla adds more to the bare executable than 30 µs plus 0.6 µs for each input.
    """
    from ..bench.overhead import show

    if not show(layers or (2, 50), width, batch, rounds):
        raise typer.Exit(1)
