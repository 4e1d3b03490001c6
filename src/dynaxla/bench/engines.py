"""The engines that the benchmark compares.

eager            PyTorch's eager mode
lazy             eager mode's Python code on the device "jax"; the ops are recorded at every call and run as one program
inductor         torch.compile's own compiler, in its default mode
torchscript      torch.jit.trace, not frozen
dynamo           TorchDynamo alone: its guards around the captured graph, which runs in eager mode
dynamo_aot       TorchDynamo and AOTAutograd around the ATen graph, which runs in eager mode
dynaxla          the backend dynaxla, which traces a graph once
dynaxla_tuned    the same with the option `tune`, which chooses implementations by measurement
dynaxla_step     dynaxla.compile_step: the whole training step as one program
dynaxla_retrace  the backend dynaxla_retrace, which traces at every call, as lazy tensors do

`benchmarks/engines.py` in the source tree has more.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from ..autoselect.candidates import no_cpp_compiler
from ..backend import dynaxla, dynaxla_retrace
from ..observe import metrics
from ..runtime import private
from ..training import compile_step
from .argument_checks import check_names
from .benchmark_error import BenchmarkError
from .training import TrainingStep

Call = Callable[..., Any]
Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class BenchEngine:
    """An engine that runs a model.

    Attributes:
        name: the engine's name.
        prepare: returns the callable for a model and example inputs; it may compile only at its first call.
        obstacle: returns the reason why the engine cannot be used here, or "". The function is fast, and imports nothing that changes this
            process.
        native: True if the engine runs on the CPU while the other engines run on the device "jax".
        on_jax: True if the engine can be used with tensors of the device "jax".
        whole_step: True if the engine prepares a whole training step, not only the step's model.
        process: starts a runner in another process, for an engine that cannot share this process; else None.
    """

    name: str
    prepare: Callable[[nn.Module, Inputs], Call]
    obstacle: Callable[[], str] = lambda: ""
    native: bool = False
    on_jax: bool = False
    whole_step: bool = False
    process: Callable[[BenchEngine, Any, Any], Any] | None = None

    def prepare_call(self, model: nn.Module, inputs: Inputs) -> Call:
        """Returns the callable for a model. For a `TrainingStep`, most engines prepare only the step's model."""
        if not isinstance(model, TrainingStep) or self.whole_step:
            return self.prepare(model, inputs)
        return model.with_compiled_model(lambda module: self.prepare(module, inputs))


def compiled(backend: Any, options: dict[str, Any] | None = None) -> Callable[[nn.Module, Inputs], Call]:
    return lambda model, _: torch.compile(model, backend=backend, options=options)


def as_training(model: nn.Module, engine: str) -> TrainingStep:
    if not isinstance(model, TrainingStep):
        raise BenchmarkError(f"the engine {engine} needs --training")
    return model


def compiled_step(model: nn.Module, _: Inputs) -> Call:
    own_model = copy.deepcopy(as_training(model, "dynaxla_step"))
    step = compile_step(own_model.step, fullgraph=True)  # compiled at its first call, which is measured

    def call(*inputs: torch.Tensor) -> Any:
        with torch.enable_grad():
            loss = step(*inputs)
        return loss, own_model.gradients()

    return call


def _lazy(model: nn.Module, _: Inputs) -> Call:
    from ..device.modes import lazy

    own_model = copy.deepcopy(model)

    def call(*inputs: torch.Tensor) -> Any:
        with lazy(), metrics.timed("record"):
            return own_model(*inputs)

    return call


def jax_device_obstacle() -> str:
    return "" if private.privateuse1_name() == "jax" else "it needs --device jax"


def _torchscript(model: nn.Module, inputs: Inputs) -> Call:
    with warnings.catch_warnings():
        # torch.jit.trace is deprecated since torch 2.9, and warns about every Python branch that it cannot see.
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, inputs, check_trace=False)


def _run_unchanged(module: torch.fx.GraphModule, _: Sequence[Any]) -> Call:
    return module.forward


def _run_unchanged_boxed(module: torch.fx.GraphModule, _: Sequence[Any]) -> Call:
    return make_boxed_func(module.forward)


ENGINES: dict[str, BenchEngine] = {
    engine.name: engine
    for engine in (
        BenchEngine("eager", lambda model, _: model, on_jax=True),
        BenchEngine("lazy", _lazy, jax_device_obstacle, on_jax=True, whole_step=True),
        BenchEngine("inductor", compiled("inductor"), no_cpp_compiler),
        BenchEngine("torchscript", _torchscript),
        BenchEngine("dynamo", compiled(_run_unchanged), on_jax=True),
        BenchEngine("dynamo_aot", compiled(aot_autograd(fw_compiler=_run_unchanged_boxed)), on_jax=True),
        BenchEngine("dynaxla", compiled(dynaxla), on_jax=True),
        BenchEngine("dynaxla_tuned", compiled(dynaxla, {"tune": True})),
        BenchEngine("dynaxla_step", compiled_step, on_jax=True, whole_step=True),
        BenchEngine("dynaxla_retrace", compiled(dynaxla_retrace), on_jax=True),
    )
}

QUICK_ENGINES = ["eager", "inductor", "dynaxla", "dynaxla_retrace"]
TRAINING_ENGINES = ["eager", "inductor", "dynaxla", "dynaxla_step", "dynaxla_retrace"]


def default_engines(suite: str, device: str, *, training: bool, quick: bool) -> list[str]:
    """Returns the names of the engines for a suite if the user names none. `device` is the type of the tensors' device."""
    if device == "jax":
        names = ["eager", "lazy", "dynaxla", *(["dynaxla_step"] if training else []), "dynaxla_retrace"]
        return names if training or quick else ["dynamo", "dynamo_aot", *names]
    if training or quick:
        return TRAINING_ENGINES if training else QUICK_ENGINES
    # torch.jit.trace records only the branches that the example inputs take, so it gives wrong results if branches depend on values.
    tracing_engines = [] if suite == "breaks" else ["torchscript"]
    return ["eager", "inductor", *tracing_engines, "dynamo", "dynamo_aot", "dynaxla", "dynaxla_retrace"]


def choose(
    names: Iterable[str], defaults: Sequence[str], device: str = "cpu", engines: Mapping[str, BenchEngine] | None = None
) -> tuple[list[BenchEngine], list[str]]:
    """Returns engines in the table's order, and notes about engines that are left out.

    Args:
        names: the engines; if empty, the engines in `defaults` that can be used here.
        defaults: the default engines.
        device: the type of the tensors' device.
        engines: the engines by name; None for ENGINES.

    Raises:
        BenchmarkError: a name is unknown, or a named engine cannot be used here.
    """
    engines = ENGINES if engines is None else engines
    requested = list(dict.fromkeys(names))
    supported = [engine.name for engine in engines.values() if engine.on_jax or device != "jax"]
    check_names("engine", requested, supported, " on the device jax" if device == "jax" else "")
    chosen, notes = [], []
    for engine in engines.values():
        if engine.name not in supported or engine.name not in (requested or defaults):
            continue
        obstacle = engine.obstacle()
        if not obstacle:
            chosen.append(engine)
        elif requested:
            raise BenchmarkError(f"the engine {engine.name!r} cannot be used here: {obstacle}")
        else:
            notes.append(f"{engine.name} left out: {obstacle}")
    return chosen, notes
