"""`dynaxla tune`: measures the forms (implementations) of a model's ops, and shows the measurements."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from ..bench import choices as known
from .bench import Batch, Device, Dtype, Threads, bad_requests_shown

_WHAT_TO_GIVE = (
    f"dynaxla tune MODEL... measures models of `dynaxla bench`: {', '.join(known.MODELS)}. "
    'torch.compile(model, backend="dynaxla", options={"tune": True}) measures a model of yours.'
)
_MODELS = typer.Argument(
    help=f"Models to measure now: {', '.join(known.MODELS)}. None: show the measurements in the cache.", show_default=False, metavar="MODEL"
)


def tune(
    models: Annotated[list[str] | None, _MODELS] = None,
    batch: Batch = 1,
    dtype: Dtype = "float32",
    device: Device = "cpu",
    threads: Threads = 1,
    clear: Annotated[bool, typer.Option("--clear", help="Delete the measurements in the cache first.")] = False,
) -> None:
    """Measure the forms (implementations) in which a model's ops can be computed, and mark the fastest with *.

    torch.compile(..., options={"tune": True}) does the same for any model, and uses the results kept in the cache directory.
    """
    import torch

    from ..bench import suites
    from ..bench.requests import check_device, check_dtype, split
    from ..bench.runner import Placement
    from ..config import Options
    from ..errors import DynaxlaError
    from ..tuning import kept, tried
    from ..tuning.table import show

    console = Console()
    console = console if console.is_terminal else Console(width=160)
    with bad_requests_shown(DynaxlaError):
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
    if cases:
        show(tried(), console)
        return
    found = kept(store) if store is not None else []
    if found:
        show(found, console)
    elif store is not None:
        console.print(f"Nothing has been measured yet: {store.folder} is empty.", highlight=False, soft_wrap=True)
    else:
        console.print("There is no cache directory: set the variable DYNAXLA_CACHE to one.")
    console.print(_WHAT_TO_GIVE, highlight=False, markup=False, soft_wrap=True)
