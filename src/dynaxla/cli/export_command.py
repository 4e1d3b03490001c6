"""`dynaxla export`: exports a user's model as a StableHLO artifact."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.markup import escape

from ..bench import choices
from ..bench.argument_checks import check_names
from ..bench.benchmark_error import BenchmarkError
from .bench import exit_on_errors

_PLATFORMS = ["cpu", "cuda", "tpu"]
_INPUT = re.compile(r"(?P<dtype>\w+)\[(?P<sizes>[^\[\]]*)\]")
_SIZE = re.compile(r"(?P<number>\d+)|(?P<name>[A-Za-z]\w*)(?:<=(?P<largest>\d+))?")
# The sizes of dynamic dimensions while the model is captured. They differ, so that torch.export does not identify two dimensions.
_EXAMPLE_SIZES = (5, 7, 11, 13, 17, 19)

_MODEL = typer.Argument(
    help="package.module:name or path/to/file.py:name, of a module, or of a function without arguments that makes one.",
    metavar="MODEL",
    show_default=False,
)
_INPUTS = typer.Option(
    "--input",
    # Escaped, since Typer would read the brackets as rich's markup.
    help=escape("A tensor that the model takes, e.g. 'float32[batch,3,224,224]' or 'int64[batch,length<=512]'; once for each, in order. ")
    + "Names are dynamic dimensions.",
    show_default=False,
)
_COMPILE = typer.Option(
    "--compile",
    help="A topology of TPUs, such as v5e:2x2. XLA's compiler for TPUs (libtpu) then compiles the program for one of the topology's chips. "
    "No TPU need be here. The program's memory is printed. Dynamic dimensions have their largest sizes.",
    metavar="TOPOLOGY",
    show_default=False,
)


class InputSpec(NamedTuple):
    """A tensor described on the command line.

    Attributes:
        dtype: torch's name of the dtype.
        sizes: numbers, or names of dynamic dimensions.
    """

    dtype: str
    sizes: tuple[int | str, ...]


def export(
    model: Annotated[str, _MODEL],
    output: Annotated[Path, typer.Option(help="The directory to write.", show_default=False)],
    inputs: Annotated[list[str] | None, _INPUTS] = None,
    platform: Annotated[
        list[str] | None,
        typer.Option("--platform", "--platforms", help=f"Of {', '.join(choices.PLATFORMS)}. Default: {', '.join(_PLATFORMS)}."),
    ] = None,
    weights: Annotated[str, typer.Option(help="arguments: next to the program; constants: inside it.")] = "arguments",
    train: Annotated[bool, typer.Option("--train", help="Leave the model in its mode; else model.eval() comes first.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an exported model that is there.")] = False,
    compile_for: Annotated[str | None, _COMPILE] = None,
) -> None:
    """Export a model as StableHLO, with weights and a manifest, for dynaxla.load, which does not need torch."""
    input_specs, largest = parse_inputs(inputs or [])
    with exit_on_errors():  # before torch and JAX are imported
        check_names("platform", platform or [], choices.PLATFORMS)
        check_names("option for weights", [weights], ("arguments", "constants"))
        if os.path.lexists(output) and not overwrite:
            raise BenchmarkError(f"{output} exists already: --overwrite replaces an exported model")
        if compile_for is not None and "tpu" not in (platform or _PLATFORMS):
            raise BenchmarkError("--compile needs a program for TPUs: add --platform tpu")
    found = load_model(model)
    import torch

    from ..errors import DynaxlaError
    from ..interop.export import export as export_model
    from ..runtime.topologies import topology

    with exit_on_errors(DynaxlaError):
        target = None if compile_for is None else topology("tpu", compile_for)
        if isinstance(found, torch.nn.Module) and not train:
            found.eval()
        exported_model = export_model(
            found,
            tuple(_tensor(spec, example_sizes(input_specs, largest)) for spec in input_specs),
            dynamic_shapes=_dynamic_shapes(input_specs, largest),
            platforms=platform or _PLATFORMS,
            weights=weights,  # type: ignore[arg-type]
        )
        exported_model.save(output, overwrite=overwrite)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"{output}: {exported_model.manifest.name} for {', '.join(exported_model.platforms)}")
    for title, specs in (("takes", exported_model.manifest.inputs), ("gives", exported_model.manifest.outputs)):
        console.print(f"  {title} {', '.join(map(str, specs))}")
    if exported_model.manifest.updates:
        console.print(f"  gives new values of {', '.join(exported_model.manifest.updates)}")
    if exported_model.manifest.draws_random:
        console.print("  draws random numbers: call(..., key=jax.random.key(0))")
    console.print(f"  {len(exported_model.manifest.weights)} weights next to the program")
    if target is not None:
        sizes = {name: high or example_sizes(input_specs, largest)[name] for name, high in largest.items()}
        with exit_on_errors(DynaxlaError):
            console.print(f"  {compilation_result(exported_model, target, input_specs, sizes)}")


def compilation_result(model: Any, target: Any, inputs: list[InputSpec], sizes: dict[str, int]) -> str:
    """Returns the result of compiling an exported model for one device of a topology, as text.

    Args:
        model: the exported model.
        target: the topology.
        inputs: the model's inputs.
        sizes: the sizes of the dynamic dimensions, by name.

    Raises: OutOfMemory if the model does not fit into the device's memory; CompilationError.
    """
    import jax

    from ..engine.executable import compilation_error, is_exhausted
    from ..errors import OutOfMemory

    shapes = [[sizes[size] if isinstance(size, str) else size for size in spec.sizes] for spec in inputs]
    try:
        memory = model.compiled_for(target.devices[0], shapes).memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if is_exhausted(error):
            message = f"{model.manifest.name} does not fit into the memory of one chip of {target}: {error}"
            raise OutOfMemory(message, hint="use smaller sizes, bfloat16, or several chips: dynaxla.sharding.report") from None
        raise compilation_error(model.manifest.name, error) from None
    mebibytes = [
        f"{size / 2**20:,.1f} MiB of {what}"
        for what, size in (
            ("weights and inputs", memory.argument_size_in_bytes),
            ("outputs", memory.output_size_in_bytes),
            ("temporary memory", memory.temp_size_in_bytes),
        )
    ]
    dimensions = "".join(f", {name}={size}" for name, size in sizes.items())
    return f"compiles for one chip of {target}{dimensions}: {', '.join(mebibytes)}"


def parse_inputs(inputs: list[str]) -> tuple[list[InputSpec], dict[str, int | None]]:
    """Parses the descriptions of inputs.

    Returns: the inputs, and the largest size of each dynamic dimension, None for no limit.
    Raises: typer.BadParameter.
    """
    found: list[InputSpec] = []
    largest: dict[str, int | None] = {}
    for text in inputs:
        match = _INPUT.fullmatch(text.replace(" ", ""))
        if match is None:
            raise typer.BadParameter(f"{text!r} does not describe a tensor; an example: float32[batch,3,224,224]", param_hint="--input")
        sizes: list[int | str] = []
        for item in match["sizes"].split(",") if match["sizes"] else []:
            size = _SIZE.fullmatch(item)
            if size is None:
                raise typer.BadParameter(f"{item!r} in {text!r} is neither a size nor a name", param_hint="--input")
            sizes.append(int(size["number"]) if size["number"] else size["name"])
            if size["name"]:
                largest[size["name"]] = int(size["largest"]) if size["largest"] else largest.get(size["name"])
        found.append(InputSpec(match["dtype"], tuple(sizes)))
    return found, largest


def example_sizes(inputs: list[InputSpec], largest: dict[str, int | None]) -> dict[str, int]:
    """Returns the size of each dynamic dimension, by name, with which the model is captured."""
    names = list(dict.fromkeys(size for spec in inputs for size in spec.sizes if isinstance(size, str)))
    return {name: min(_EXAMPLE_SIZES[index % len(_EXAMPLE_SIZES)], largest[name] or _EXAMPLE_SIZES[-1]) for index, name in enumerate(names)}


def _tensor(spec: InputSpec, sizes: dict[str, int]) -> Any:
    """Returns an example tensor: random floats, or integer zeros, which are valid indices of any embedding."""
    import torch

    dtype = getattr(torch, spec.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise typer.BadParameter(f"torch has no dtype {spec.dtype!r}", param_hint="--input")
    shape = [sizes[size] if isinstance(size, str) else size for size in spec.sizes]
    return torch.randn(shape).to(dtype) if dtype.is_floating_point or dtype.is_complex else torch.zeros(shape, dtype=dtype)


def _dynamic_shapes(inputs: list[InputSpec], largest: dict[str, int | None]) -> Any:
    from torch.export import Dim

    dims = {name: Dim(name, max=high) if high else Dim(name) for name, high in largest.items()}
    if not dims:
        return None
    return tuple({dim: dims[size] for dim, size in enumerate(spec.sizes) if isinstance(size, str)} for spec in inputs)


def load_model(reference: str) -> Any:
    """Imports a model. Any callable that is not a module is called, and must return one. `reference` is module:name or path.py:name.

    Raises: typer.BadParameter; the errors of the user's code.
    """
    import importlib
    import sys

    source, _, name = reference.rpartition(":")
    if not source or not name:
        raise typer.BadParameter(f"{reference!r}: give package.module:name or path/to/file.py:name", param_hint="MODEL")
    try:
        if source.endswith(".py"):
            path = Path(source).resolve()
            if not path.is_file():
                raise typer.BadParameter(f"{source} is not a file", param_hint="MODEL")
            sys.path.insert(0, str(path.parent))
            found = importlib.import_module(path.stem)
        else:
            sys.path.insert(0, "")
            found = importlib.import_module(source)
    except ModuleNotFoundError as error:
        raise typer.BadParameter(f"{source}: {error}", param_hint="MODEL") from None
    finally:
        sys.path.pop(0)
    for part in name.split("."):
        if not hasattr(found, part):
            raise typer.BadParameter(f"{source} has no {name}", param_hint="MODEL")
        found = getattr(found, part)
    import torch

    if isinstance(found, torch.nn.Module):
        return found
    model = found() if callable(found) else found
    if not isinstance(model, torch.nn.Module):
        raise typer.BadParameter(f"{reference} returns a {type(model).__name__}, not a torch.nn.Module", param_hint="MODEL")
    return model
