"""The engines: the ways to run a model that the benchmark compares.

eager            PyTorch's eager mode
lazy             eager mode's Python code on the device "jax"; the ops are recorded at every call and run as one program
inductor         torch.compile's own compiler, in its default mode
torchscript      torch.jit.trace, not frozen
dynamo           TorchDynamo alone: its guards around the captured graph, which runs in eager mode
dynamo_aot       TorchDynamo and AOTAutograd around the ATen graph, which runs in eager mode
dynaxla          trace once
dynaxla_tuned    trace once, implementations chosen by measurement
dynaxla_frozen   trace once, with the option freeze
dynaxla_separate for a training step: one program each for forward pass, backward pass and optimizer
dynaxla_step     dynaxla.compile_step: the whole training step as one program
inductor_autotuned  Inductor in its mode max-autotune, which also uses CUDA graphs
inductor_frozen  Inductor with torch._inductor.config.freezing
dynaxla_retrace  trace at every call, as lazy tensors do
..._native       eager, dynaxla or dynaxla_step on CPU tensors, to compare with tensors of the device "jax"
jax              the model as a JAX function (dynaxla.to_jax) under jax.jit; inputs and results are passed by DLPack
xla_...          trace once, with one XLA option that differs from dynaxla's choice (see XLA_OPTIONS, XLA_GPU_OPTIONS)
torchax          google/torchax, if it can be imported; in a process of its own, since importing it breaks torch.compile
torch_xla        TorchDynamo's openxla backend, if torch_xla can be imported; in a process of its own, since it registers a device
"""

from __future__ import annotations

import copy
import importlib.util
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils import _pytree as pytree

from ..backend import dynaxla, dynaxla_retrace
from ..engine.options import COMMANDS, WITHOUT_CONVOLUTIONS
from ..ensemble.candidates import no_cpp_compiler
from ..observe import metrics
from ..runtime import private
from ..training import compile_step
from .benchmark_error import BenchmarkError
from .training import Training

Call = Callable[..., Any]
Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Engine:
    """One way to run a model.

    Attributes:
        name: the engine's name.
        prepare: returns the callable for a model and example inputs; it may compile only at its first call.
        obstacle: returns the reason why the engine cannot be used here, or "". It is cheap, and imports nothing that changes this process.
        isolated: True if it must run in a process of its own.
        native: True if it runs on the CPU while the other engines run on the device "jax".
    """

    name: str
    prepare: Callable[[nn.Module, Inputs], Call]
    obstacle: Callable[[], str] = lambda: ""
    isolated: bool = False
    native: bool = False

    def prepare_call(self, model: nn.Module, inputs: Inputs) -> Call:
        """Returns the callable for a model. For a `Training`, most engines prepare only its model."""
        if not isinstance(model, Training) or self.name in FOR_TRAINING:
            return self.prepare(model, inputs)
        return model.compiled(lambda module: self.prepare(module, inputs))


def _compiled(backend: Any, options: dict[str, Any] | None = None) -> Callable[[nn.Module, Inputs], Call]:
    return lambda model, _: torch.compile(model, backend=backend, options=options)


def _autotuned_inductor(model: nn.Module, _: Inputs) -> Call:
    return torch.compile(model, backend="inductor", mode="max-autotune")


def _as_training(model: nn.Module, engine: str) -> Training:
    if not isinstance(model, Training):
        raise BenchmarkError(f"the engine {engine} is one for --training")
    return model


def _separate(model: nn.Module, _: Inputs) -> Call:
    def compiled(function: Any) -> Any:
        return torch.compile(function, backend=dynaxla)

    return _as_training(model, "dynaxla_separate").compiled(compiled, compiled)


def _compiled_step(model: nn.Module, _: Inputs) -> Call:
    mine = copy.deepcopy(_as_training(model, "dynaxla_step"))
    step = compile_step(mine.step, fullgraph=True)  # compiled at its first call, which is measured

    def call(*inputs: torch.Tensor) -> Any:
        with torch.enable_grad():
            loss = step(*inputs)
        return loss, mine.gradients()

    return call


def _as_jax_function(model: nn.Module, inputs: Inputs) -> Call:
    from ..interop import to_jax

    jax_fn, params = to_jax(model)
    with jax.enable_x64(True):
        params = jax.device_put(params, jax.dlpack.from_dlpack(inputs[0]).device)
    compiled = jax.jit(jax_fn)

    def call(*args: torch.Tensor) -> Any:
        with jax.enable_x64(True):
            return pytree.tree_map(torch.from_dlpack, compiled(params, *map(jax.dlpack.from_dlpack, args)))

    return call


def _frozen_inductor(model: nn.Module, inputs: Inputs) -> Call:
    """Compiles a model by a first call with Inductor's `freezing`.

    TorchDynamo, too, reads this setting, so it has to be set globally during the call; as an option of torch.compile it freezes nothing. A
    separate backend function keeps TorchDynamo from reusing code compiled for plain Inductor.
    """
    from torch._inductor import config  # Inductor takes a second to import
    from torch._inductor.compile_fx import compile_fx

    def frozen(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Call:
        return compile_fx(module, inputs)

    compiled = torch.compile(model, backend=frozen)
    with config.patch(freezing=True):
        compiled(*inputs)
    return compiled


def _lazy(model: nn.Module, _: Inputs) -> Call:
    from ..device.modes import lazy

    mine = copy.deepcopy(model)

    def call(*inputs: torch.Tensor) -> Any:
        with lazy(), metrics.timed("record"):
            return mine(*inputs)

    return call


def _no_device() -> str:
    return "" if private.spare_device_name() == "jax" else "it is one for --device jax"


def _torchscript(model: nn.Module, inputs: Inputs) -> Call:
    with warnings.catch_warnings():
        # torch.jit.trace is deprecated since torch 2.9, and warns about every Python branch that it cannot see.
        warnings.simplefilter("ignore")
        return torch.jit.trace(model, inputs, check_trace=False)


def _graph_as_it_is(module: torch.fx.GraphModule, _: Sequence[Any]) -> Call:
    return module.forward


def _boxed_graph_as_it_is(module: torch.fx.GraphModule, _: Sequence[Any]) -> Call:
    return make_boxed_func(module.forward)


def _torchax(model: nn.Module, _: Inputs) -> Call:
    """Compiles a model with torchax. Inputs and results are converted at each call, since all engines take and return torch tensors."""
    import torchax

    environment = torchax.default_env()
    mine = copy.deepcopy(model)
    with environment:
        compiled = torchax.compile(mine.to("jax"))

    def call(*inputs: torch.Tensor) -> Any:
        with environment:
            result = compiled(*[tensor.to("jax") for tensor in inputs])
            return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)

    return call


def _torch_xla(model: nn.Module, _: Inputs) -> Call:
    """Compiles a model with torch_xla. The time includes moving inputs and results at each call, as in PR #87741."""
    import torch_xla

    device = torch_xla.device()
    compiled = torch.compile(copy.deepcopy(model).to(device), backend="openxla")

    def call(*inputs: torch.Tensor) -> Any:
        result = compiled(*[tensor.to(device) for tensor in inputs])
        return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), result)

    return call


def _not_importable(module: str) -> Callable[[], str]:
    def obstacle() -> str:
        if importlib.util.find_spec(module) is None:
            return f"{module} is not installed"
        attempt = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True, text=True, check=False)
        last_line = attempt.stderr.strip().rpartition("\n")[2]
        return f"{module} cannot be imported: {last_line}" if attempt.returncode else ""

    return obstacle


# XLA's options on the CPU, by engine. dynaxla keeps XLA's defaults for emitters (on) and fast math (off). It sets the vector width (512
# bits if the processor has them; XLA's default is 256), the scheduler (the one that saves memory), and the ops for which XLA calls its
# library YNN (single products and convolutions).
XLA_OPTIONS: dict[str, dict[str, Any]] = {
    "xla_vectors_128": {"xla_cpu_prefer_vector_width": 128},
    "xla_vectors_256": {"xla_cpu_prefer_vector_width": 256},
    "xla_old_emitters": {"xla_cpu_use_fusion_emitters": False},
    "xla_concurrent": {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED"},
    "xla_no_library": {"xla_cpu_experimental_ynn_fusion_type": ""},
    "xla_reassociated": {
        "xla_cpu_enable_fast_math": True,
        "xla_cpu_fast_math_honor_nans": True,
        "xla_cpu_fast_math_honor_infs": True,
        "xla_cpu_fast_math_honor_division": True,
        "xla_cpu_fast_math_honor_functions": True,
    },
}

# The same for GPUs, where dynaxla rounds half types at the same points as eager mode, and puts convolutions into CUDA graphs.
XLA_GPU_OPTIONS: dict[str, dict[str, Any]] = {
    "xla_fewer_roundings": {"xla_allow_excess_precision": True},
    "xla_small_graphs": {COMMANDS: WITHOUT_CONVOLUTIONS},
}

_ALL = [
    Engine("eager", lambda model, _: model),
    Engine("lazy", _lazy, _no_device),
    Engine("inductor", _compiled("inductor"), no_cpp_compiler),
    Engine("torchscript", _torchscript),
    Engine("dynamo", _compiled(_graph_as_it_is)),
    Engine("dynamo_aot", _compiled(aot_autograd(fw_compiler=_boxed_graph_as_it_is))),
    Engine("dynaxla", _compiled(dynaxla)),
    Engine("dynaxla_tuned", _compiled(dynaxla, {"tune": True})),
    Engine("dynaxla_frozen", _compiled(dynaxla, {"freeze": True})),
    Engine("dynaxla_separate", _separate),
    Engine("dynaxla_step", _compiled_step),
    Engine("inductor_autotuned", _autotuned_inductor, no_cpp_compiler),
    Engine("inductor_frozen", _frozen_inductor, no_cpp_compiler),
    Engine("dynaxla_retrace", _compiled(dynaxla_retrace)),
    Engine("eager_native", lambda model, _: model, _no_device, native=True),
    Engine("dynaxla_native", _compiled(dynaxla), _no_device, native=True),
    Engine("dynaxla_step_native", _compiled_step, _no_device, native=True),
    Engine("jax", _as_jax_function),
    *(Engine(name, _compiled(dynaxla, {"xla": options})) for name, options in (XLA_OPTIONS | XLA_GPU_OPTIONS).items()),
    Engine("torchax", _torchax, _not_importable("torchax"), isolated=True),
    Engine("torch_xla", _torch_xla, _not_importable("torch_xla"), isolated=True),
]

ENGINES: dict[str, Engine] = {engine.name: engine for engine in _ALL}

# Engines that prepare the whole training step, not only its model.
FOR_TRAINING = ("lazy", "dynaxla_separate", "dynaxla_step", "dynaxla_step_native")

# TorchScript repeats the path of the example inputs, so it gives wrong results for models whose path depends on values.
USUAL: Mapping[str, list[str]] = {
    "models": ["eager", "inductor", "torchscript", "dynamo", "dynamo_aot", "dynaxla", "dynaxla_retrace"],
    "breaks": ["eager", "inductor", "dynamo", "dynamo_aot", "dynaxla", "dynaxla_retrace"],
}
# Engines for tensors of the device "jax". There, eager mode runs each op as an XLA program; results are compared with those of the CPU.
ON_THE_DEVICE_JAX = (
    "eager", "lazy", "dynamo", "dynamo_aot", "dynaxla", "dynaxla_separate", "dynaxla_step", "dynaxla_retrace", "eager_native",
    "dynaxla_native", "dynaxla_step_native",
)  # fmt: skip
_FOR_THE_DEVICE_JAX = [engine.name for engine in _ALL if engine.obstacle is _no_device]
QUICK = ["eager", "inductor", "dynaxla", "dynaxla_retrace"]
TRAINING = ["eager", "inductor", "dynaxla", "dynaxla_separate", "dynaxla_step", "dynaxla_retrace"]


def usual_ones(suite: str, device: str, *, training: bool, quick: bool) -> list[str]:
    """Returns the engines for a suite if none are named. `device` is the type of the tensors' device."""
    if device == "jax":
        names = (
            ["eager", "lazy", "dynaxla", "dynaxla_step", "dynaxla_retrace"] if training else ["eager", "lazy", "dynaxla", "dynaxla_retrace"]
        )
        return names if training or quick else ["dynamo", "dynamo_aot", *names]
    return TRAINING if training else QUICK if quick else USUAL.get(suite, [name for name in ENGINES if name not in _FOR_THE_DEVICE_JAX])


def choose(names: Iterable[str], usual: Sequence[str], device: str = "cpu") -> tuple[list[Engine], list[str]]:
    """Returns engines in the table's order, and notes about engines that are left out.

    Args:
        names: the engines; if empty, those in `usual` that can be used here.
        usual: the default engines.
        device: the type of the tensors' device.

    Raises:
        BenchmarkError: a name is unknown, or a named engine cannot be used here.
    """
    wanted = list(dict.fromkeys(names))
    known = list(ON_THE_DEVICE_JAX if device == "jax" else ENGINES)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        where = " on the device jax" if device == "jax" else ""
        raise BenchmarkError(f"no engine {', '.join(map(repr, unknown))}{where}; there are: {', '.join(known)}")
    chosen, notes = [], []
    for engine in ENGINES.values():
        if engine.name not in known or engine.name not in (wanted or usual):
            continue
        obstacle = engine.obstacle()
        if not obstacle:
            chosen.append(engine)
        elif wanted:
            raise BenchmarkError(f"the engine {engine.name!r} cannot be used here: {obstacle}")
        else:
            notes.append(f"{engine.name} left out: {obstacle}")
    return chosen, notes
