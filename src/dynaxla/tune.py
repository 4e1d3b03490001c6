"""`dynaxla tune`: measure the forms of a model's ops, and show what was tried."""

from __future__ import annotations

from typing import Annotated

import torch
import typer
from rich.console import Console

from .bench import suites
from .bench.__main__ import Batch, Device, Dtype, Threads, check_device, check_dtype, split
from .bench.errors import BenchmarkError
from .bench.runner import Placement
from .config import Options
from .errors import DynaxlaError
from .tuning import kept, show, tried

_MODELS = typer.Argument(help="Models of `dynaxla bench`, to measure now. None: show what the cache holds.", show_default=False)


def tune(
    models: Annotated[list[str] | None, _MODELS] = None,
    batch: Batch = 1,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 1,
    clear: Annotated[bool, typer.Option("--clear", help="Forget what the cache holds first.")] = False,
) -> None:
    """Measure the forms in which a model's ops can be computed, and show which is the fastest; * marks it.

    torch.compile(..., options={"tune": True}) does the same for any model, and uses the results kept in the cache directory.
    """
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    try:
        placement = Placement(batch, check_dtype(dtype), check_device(device), threads=threads)
        cases = suites.choose("models", split(models)) if models else []
        store = Options().store("tuning")
        if clear and store is not None:
            store.clear()
        torch.set_num_threads(threads)
        for case in cases:
            console.print(f"measuring {case.name}", style="dim")
            compiled = torch.compile(placement.model(case), backend="dynaxla", options={"tune": True})
            with torch.no_grad():
                compiled(*placement.inputs(case, torch.Generator().manual_seed(placement.seed)))
            torch._dynamo.reset()
    except (BenchmarkError, DynaxlaError) as error:
        Console(stderr=True).print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    if cases:
        show(tried(), console)
    elif store is None:
        console.print("There is no cache directory: the variable DYNAXLA_CACHE names one.")
    else:
        show(kept(store), console)
