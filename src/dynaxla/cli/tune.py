"""`dynaxla tune`: measures the implementations of a model's ops, and shows the measurements."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..bench import choices
from ..cache_folder import cache_folder, is_known_to_be_empty
from .bench import Batch, Device, Dtype, Threads, exit_on_errors
from .terminal import console_for

_USAGE_HINT = (
    f"dynaxla tune MODEL... measures models of `dynaxla bench`: {', '.join(choices.MODELS)}. "
    'torch.compile(model, backend="dynaxla", options={"tune": True}) measures your own model.'
)
_MODELS = typer.Argument(
    help=f"Models to measure now: {', '.join(choices.MODELS)}. None: show the measurements in the cache.",
    show_default=False,
    metavar="MODEL",
)


def tune(
    models: Annotated[list[str] | None, _MODELS] = None,
    batch: Batch = 1,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 1,
    clear: Annotated[bool, typer.Option("--clear", help="Delete the measurements in the cache first.")] = False,
) -> None:
    """Measure the implementations of a model's ops, and mark the chosen ones with *.

    torch.compile(..., options={"tune": True}) does the same for any model, and uses the results kept in the cache directory.
    """
    from ..bench.argument_checks import check_device_name, check_names, split_at_commas

    names = split_at_commas(models)
    with exit_on_errors():  # before torch and JAX are imported
        check_names("model", names, choices.MODELS)
        check_names("dtype", [dtype], choices.DTYPES)
        check_device_name(device)
    console = console_for(160)
    if not names and ((folder := _folder()) is None or is_known_to_be_empty(folder)):
        _print_no_measurements(folder, console)
        return
    import torch

    from ..bench import suites
    from ..bench.argument_checks import check_device, check_dtype
    from ..bench.runner import ModelSetup
    from ..config import Options
    from ..errors import DynaxlaError
    from ..tuning import measurements, stored_measurements
    from ..tuning.table import show

    with exit_on_errors(DynaxlaError):
        setup = ModelSetup(batch, check_dtype(dtype), check_device(device), threads=threads)
        cases = suites.choose("models", names) if names else []
        store = Options().store("tuning")
        if clear and store is not None:
            store.clear()
        torch.set_num_threads(threads)
        for case in cases:
            console.print(f"measuring {case.name}", style="dim")
            compiled = torch.compile(setup.model(case), backend="dynaxla", options={"tune": True})
            with torch.no_grad():
                compiled(*setup.inputs(case, torch.Generator().manual_seed(setup.seed)))
            torch._dynamo.reset()
    if cases:
        show(measurements(), console)
        return
    if found := stored_measurements(store) if store is not None else []:
        show(found, console)
        console.print(_USAGE_HINT, highlight=False, markup=False, soft_wrap=True)
    else:
        _print_no_measurements(store.folder if store is not None else None, console)


def _folder() -> Path | None:
    """Returns the folder of measurements; None if the cache is off, or if the user has no home. Neither torch nor JAX is imported."""
    try:
        return cache_folder("tuning", os.environ.get("DYNAXLA_CACHE"))
    except RuntimeError:
        return None


def _print_no_measurements(folder: Path | None, console: Console) -> None:
    if folder is None:
        console.print("There is no cache directory: set the variable DYNAXLA_CACHE to one.")
    else:
        console.print(f"Nothing has been measured yet: {folder} is empty.", highlight=False, markup=False, soft_wrap=True)
    console.print(_USAGE_HINT, highlight=False, markup=False, soft_wrap=True)
