"""The programs of a call, compiled for a topology: those of torch.compile and compile_step, and that of a JAX function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import torch
from jax.sharding import SingleDeviceSharding
from torch import nn
from torch.utils import _pytree as pytree

import dynaxla
from dynaxla.engine.executable import ProgramRun, recorded_runs
from dynaxla.runtime import meshes
from dynaxla.runtime.topologies import topology
from dynaxla.sharding.traffic import collectives_of
from dynaxla.training.step import CompiledStep

from .figures import figures

# One chip is described by a topology of four, the smallest.
CHIP = "v5e:2x2"
Figures = dict[str, dict[str, Any]]


def of_call(call: Callable[[], Any], name: str = CHIP) -> Figures:
    """Returns the figures of the programs that a call would run, by kind: "inference", "forward", "backward"."""
    with recorded_runs() as runs, meshes.compile_only(topology("tpu", name)):
        call()
    figures_by_kind: Figures = {}
    for run in runs:
        kind = run.name.rpartition("_")[2]
        figures_by_kind[kind if kind not in figures_by_kind else f"{kind} {len(figures_by_kind)}"] = _of_run(run)
    return figures_by_kind


def _of_run(run: ProgramRun) -> dict[str, Any]:
    program = run.program
    assert program is not None
    run_figures = figures(program.text(), program.memory(), program.costs())
    if program.mesh is not None:
        run_figures["collectives"] = {}
        for item in collectives_of(run):
            count, size = run_figures["collectives"].get(item.kind, (0, 0))
            run_figures["collectives"][item.kind] = (count + item.count, size + item.bytes)
    return run_figures


def of_model(model: nn.Module, *args: torch.Tensor, training: bool = False) -> Figures:
    """Returns the figures of a model's call, or of its forward and backward pass. The model and the arguments are moved to the device."""
    torch._dynamo.reset()
    dynaxla.device.enable()
    model = model.train(training).to("jax")
    inputs = [arg.to("jax") for arg in args]
    compiled = torch.compile(model, backend="dynaxla", fullgraph=True, dynamic=False)
    size_of_outputs = 0

    def call() -> None:
        nonlocal size_of_outputs
        with torch.set_grad_enabled(training):
            outputs = [leaf for leaf in pytree.tree_leaves(compiled(*inputs)) if isinstance(leaf, torch.Tensor)]
            size_of_outputs = sum(output.nbytes for output in outputs)
            if training:
                differentiable = [output for output in outputs if output.requires_grad]
                torch.autograd.backward(differentiable, [torch.empty_like(output) for output in differentiable])

    return of_call(call)


def of_step(step: Callable[[], Any], name: str = CHIP) -> Figures:
    """Returns the figures of a training step, which is recorded and does not run."""
    torch._dynamo.reset()
    compiled = dynaxla.compile_step(step, fullgraph=True)  # a step that cannot be recorded would run, with all its memory
    assert isinstance(compiled, CompiledStep)
    return of_call(compiled.call_as_program, name)


def of_jax(function: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Returns the figures of a JAX function for arguments with these shapes and dtypes."""
    sharding = SingleDeviceSharding(topology("tpu", CHIP).devices[0])
    avals = jax.tree.map(lambda arg: jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=sharding), args)
    compiled = jax.jit(function).trace(*avals).lower(lowering_platforms=("tpu",)).compile()
    return figures(compiled.as_text() or "", compiled.memory_analysis(), compiled.cost_analysis())


def parameters(model: nn.Module) -> Mapping[str, jax.ShapeDtypeStruct]:
    """Returns a model's parameters and buffers by name, as JAX describes them."""
    tensors: Sequence[tuple[str, torch.Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    return {name: described(tensor) for name, tensor in tensors}


def described(tensor: torch.Tensor) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
