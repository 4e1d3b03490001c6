"""The two backends of `torch.compile`, found by name through the entry-point group `torch_dynamo_backends`.

A graph's life: TorchDynamo's FX graph -> AOTAutograd's functional ATen graphs -> (at the first call with given sizes) StableHLO -> an
XLA executable; every later call is that executable's.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import TracingContext
from torch.fx import GraphModule

from .capture.decompositions import decompositions
from .capture.partition import partition
from .capture.signature import check_tensor
from .capture.wrapper import is_idle
from .config import Options
from .errors import DynaxlaError, OptionError
from .lowering.forms import check_forced
from .observe import dump, metrics
from .program import AnyProgram, Phase, Program, RetracedProgram, make_program
from .runtime import devices

_graph_numbers = itertools.count()


def dynaxla(
    module: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Trace once: the graph is lowered and compiled for each combination of input sizes, then only run.

    Use: torch.compile(model, backend="dynaxla", options={...}); see `Options`.
    Raises: OptionError, UnsupportedOp, UnsupportedTensor, DeviceMismatch.
    """
    return _compile(Program, module, example_inputs, Options.parse(options, mode))


def dynaxla_retrace(
    module: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """Trace again at every call, as lazy tensors do, and find the executable by the program's hash: the baseline.

    Source: the backend `torchxla_trivial` of PyTorch PR #87741.
    """
    return _compile(RetracedProgram, module, example_inputs, Options.parse(options, mode))


def compile_graph(module: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """A graph of ATen ops, which may write to its inputs, as a program. Call it under `torch.no_grad()`."""
    return _compile(Program, module, example_inputs, options)


def _compile(kind: type[Program], module: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    check_forced(options.forms)
    options.store("programs")  # a directory that cannot be used is refused now
    if options.dump is not None:
        dump.prepare(options.dump)
    tensors = [example for example in example_inputs if isinstance(example, torch.Tensor)]
    for tensor in tensors:
        check_tensor(tensor, "an input")
    platform = devices.platform_of(_device_of(tensors))
    number = next(_graph_numbers)
    bare: list[AnyProgram] = []

    def compiler(phase: Phase) -> Callable[[GraphModule, Sequence[Any]], AnyProgram]:
        def compile_graph(aten_graph: GraphModule, _: Sequence[Any]) -> AnyProgram:
            static = _static_inputs() if phase != "backward" else ()
            if options.freeze and phase != "inference":
                hint = "call the model under torch.no_grad(), or model.requires_grad_(False)"
                raise OptionError("option freeze is for inference, but gradients are wanted here", hint=hint)
            program = make_program(kind, f"dynaxla_{number}_{phase}", aten_graph, static, options, phase)
            metadata = _metadata()
            if phase == "inference" and metadata is not None and is_idle(metadata, aten_graph, example_inputs):
                bare.append(program)
            return program

        return compile_graph

    capture = aot_autograd(
        fw_compiler=compiler("forward"),
        bw_compiler=compiler("backward"),
        inference_compiler=compiler("inference"),
        partition_fn=partition,
        decompositions=decompositions(platform),
    )
    try:
        with metrics.timed("capture"):
            compiled = capture(module, example_inputs)
        if bare:
            (program,) = bare
            return lambda *args: program(list(args))
        # TorchDynamo disables itself around what it gets; the wrapper by which AOTAutograd's helper does the same costs every call.
        return getattr(compiled, "_torchdynamo_orig_callable", compiled)
    except DynaxlaError as error:
        error.first_useful_frame = inspect.currentframe()  # torch.compile cuts its own frames above this one from the traceback
        raise


def _static_inputs() -> Sequence[int]:
    """Positions of parameters and buffers among the graph's inputs."""
    metadata = _metadata()
    return metadata.static_input_indices if metadata is not None else ()


def _metadata() -> Any:
    """What AOTAutograd knows of the graph's inputs and outputs; None outside of TorchDynamo."""
    context = TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def _device_of(tensors: Sequence[torch.Tensor]) -> torch.device:
    with_dims = {tensor.device for tensor in tensors if tensor.dim()} or {tensor.device for tensor in tensors}
    return devices.common_device(with_dims)
