"""More engines than `dynaxla.bench.engines` has.

dynaxla_frozen   trace once, with the option freeze
dynaxla_separate for a training step: one program each for forward pass, backward pass and optimizer
inductor_autotuned  Inductor in its mode max-autotune, which also uses CUDA graphs
inductor_frozen  Inductor with torch._inductor.config.freezing
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
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import torch
from torch import nn
from torch.utils import _pytree as pytree

from dynaxla.autoselect.candidates import no_cpp_compiler
from dynaxla.backend import dynaxla
from dynaxla.bench import engines
from dynaxla.bench.engines import BenchEngine, Call, Inputs, as_training, compiled, compiled_step, jax_device_obstacle
from dynaxla.engine.options import COMMAND_BUFFER_OPTION, WITHOUT_CONVOLUTIONS
from dynaxla.interop import to_jax


def _in_another_process(engine: BenchEngine, case: Any, setup: Any) -> Any:
    from .processes import Remote  # which imports this module

    return Remote(engine, case, setup)


def _autotuned_inductor(model: nn.Module, _: Inputs) -> Call:
    return torch.compile(model, backend="inductor", mode="max-autotune")


def _separate(model: nn.Module, _: Inputs) -> Call:
    def compile_function(function: Any) -> Any:
        return torch.compile(function, backend=dynaxla)

    return as_training(model, "dynaxla_separate").with_compiled_model(compile_function, compile_function)


def _as_jax_function(model: nn.Module, inputs: Inputs) -> Call:
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
    """Compiles a model with torch_xla. The time includes moving inputs and results at each call, as in pytorch/pytorch#87741."""
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
    "xla_small_graphs": {COMMAND_BUFFER_OPTION: WITHOUT_CONVOLUTIONS},
}

_MORE = [
    BenchEngine("dynaxla_frozen", compiled(dynaxla, {"freeze": True})),
    BenchEngine("dynaxla_separate", _separate, on_jax=True, whole_step=True),
    BenchEngine("inductor_autotuned", _autotuned_inductor, no_cpp_compiler),
    BenchEngine("inductor_frozen", _frozen_inductor, no_cpp_compiler),
    BenchEngine("eager_native", lambda model, _: model, jax_device_obstacle, native=True, on_jax=True),
    BenchEngine("dynaxla_native", compiled(dynaxla), jax_device_obstacle, native=True, on_jax=True),
    BenchEngine("dynaxla_step_native", compiled_step, jax_device_obstacle, native=True, on_jax=True, whole_step=True),
    BenchEngine("jax", _as_jax_function),
    *(BenchEngine(name, compiled(dynaxla, {"xla": options})) for name, options in (XLA_OPTIONS | XLA_GPU_OPTIONS).items()),
    BenchEngine("torchax", _torchax, _not_importable("torchax"), process=_in_another_process),
    BenchEngine("torch_xla", _torch_xla, _not_importable("torch_xla"), process=_in_another_process),
]

ENGINES: dict[str, BenchEngine] = {**engines.ENGINES, **{engine.name: engine for engine in _MORE}}

default_engines = engines.default_engines


def choose(names: Iterable[str], usual: Sequence[str], device: str = "cpu") -> tuple[list[BenchEngine], list[str]]:
    """Returns engines of ENGINES, as `dynaxla.bench.engines.choose` does."""
    return engines.choose(names, usual, device, ENGINES)
