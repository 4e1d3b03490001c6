"""The commands of `python -m benchmarks`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dynaxla.bench.argument_checks import split_at_commas
from dynaxla.cli.bench import Device, exit_on_errors

from . import choices, cpu, device_jax, gpu, overhead

app = typer.Typer(no_args_is_help=True, add_completion=False)

_PARTS = typer.Argument(help=f"Of: {', '.join(choices.PARTS)}. Default: all.", show_default=False)


@app.command("cpu")
def bench_cpu(
    parts: Annotated[list[str] | None, _PARTS] = None,
    output: Annotated[
        Path, typer.Option(help="The directory of cpu.md, cpu.json and ops.md. Other parts that are there already are kept.")
    ] = Path("."),
    models: Annotated[list[str] | None, typer.Option(help="Only these models, by comma or repeated.", show_default=False)] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Seconds of timing for each engine of a model.")] = 2.0,
) -> None:
    """Compare dynaxla with eager mode and Inductor on the CPU, and write the tables as cpu.md, and those of single ops as ops.md.

    All parts together take more than three hours.

    The exit code is 1 if a model fails or disagrees with eager, 2 for a request that cannot be met.
    """
    with exit_on_errors():
        good = cpu.write(split_at_commas(parts), output, split_at_commas(models), seconds)
    asked = set(split_at_commas(parts) or choices.PARTS)
    for page in [*(["cpu.md"] if asked - {choices.OPS} else []), *(["ops.md"] if choices.OPS in asked else [])]:
        Console().print((output / page).read_text(), markup=False, highlight=False)
    if not good:
        raise typer.Exit(1)


_GPU_PARTS = typer.Argument(
    help="PRECISION-batchN, followed by -training, -autotuned, both or neither: PRECISION is float32, tf32 or bfloat16, N is 1 or 32. "
    "Also bfloat16-batchN-variants. Default: all.",
    show_default=False,
)


@app.command("gpu")
def bench_gpu(
    parts: Annotated[list[str] | None, _GPU_PARTS] = None,
    output: Annotated[Path, typer.Option(help="The directory of gpu.md and gpu.json. Rows in them are kept.")] = Path("."),
    models: Annotated[list[str] | None, typer.Option(help="Only these models, by comma or repeated.", show_default=False)] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Seconds of timing for each engine of a model.")] = 2.0,
    minutes: Annotated[float, typer.Option(min=0.0, help="Minutes until the command stops. The same command then continues.")] = 9.0,
    jobs: Annotated[int, typer.Option(min=1, help="Number of models that compile at once. They are timed one after the other.")] = 6,
    device: Device = "cuda",
) -> None:
    """Compare dynaxla with eager mode and Inductor on a GPU, and write the tables as gpu.md. All parts together take hours.

    The exit code is 1 if a model fails, disagrees with eager or is not measured yet, 2 for a request that cannot be met.
    """
    with exit_on_errors():
        good = gpu.write(split_at_commas(parts), output, split_at_commas(models), seconds, minutes, device, jobs)
    Console().print((output / "gpu.md").read_text(), markup=False, highlight=False, soft_wrap=True)
    if not good:
        raise typer.Exit(1)


_DEVICE_PARTS = typer.Argument(help=f"Of: {', '.join(choices.DEVICE_PARTS)}. Default: all.", show_default=False)


@app.command("device")
def bench_device(
    parts: Annotated[list[str] | None, _DEVICE_PARTS] = None,
    output: Annotated[Path, typer.Option(help="The directory of device.md and device.json. Rows in them are kept.")] = Path("."),
    models: Annotated[list[str] | None, typer.Option(help="Only these models, by comma or repeated.", show_default=False)] = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="Seconds of timing for each engine of a model.")] = 1.0,
    minutes: Annotated[float, typer.Option(min=0.0, help="Minutes after which no model is begun; a second run continues.")] = 7.0,
    device: Annotated[str, typer.Option(help="jax, or jax:N.")] = "jax",
) -> None:
    """Compare graphs traced once with lazy and eager mode on the device "jax", and with CPU tensors, and write the tables as device.md.

    The exit code is 1 if a model fails, disagrees with eager or is not measured yet, 2 for a request that cannot be met.
    """
    with exit_on_errors():
        good = device_jax.write(split_at_commas(parts), output, split_at_commas(models), seconds, minutes, device)
    Console().print((output / "device.md").read_text(), markup=False, highlight=False, soft_wrap=True)
    if not good:
        raise typer.Exit(1)


@app.command("overhead")
def measure_overhead(
    layers: Annotated[list[int] | None, typer.Option(help="Layers of the perceptron; repeat for several. Default: 2 and 50.")] = None,
    width: Annotated[int, typer.Option(min=1, help="Width of the perceptron's layers.")] = 32,
    batch: Annotated[int, typer.Option(min=1, help="Batch size.")] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds of 100 calls.")] = 60,
) -> None:
    """Measure the overhead of a call beyond XLA's own execution, on one thread.

    The exit code is 1 if dynaxla adds more to the bare executable than 30 µs plus 0.6 µs for each input.
    """
    if not overhead.show(layers or (2, 50), width, batch, rounds):
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
