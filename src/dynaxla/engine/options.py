"""XLA's own options for a program, chosen by measurement (docs/benchmarks)."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import torch
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..lowering.settings import EXACT, Settings
from ..runtime.clients import cpu_device
from ..runtime.programs import compile_lowered

_VECTORS = "xla_cpu_prefer_vector_width"

# XLA:CPU's library fusions of reductions lose NaNs in max and min over more than a few thousand elements, and compute a pooling again for
# each use inside a fused dot (vgg16's classifier at batch 8: 24 s). So the library gets dots and convolutions alone. The scheduler that
# saves memory is no slower, and a training step needs up to half less for what is in between.
_CPU_OPTIONS = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION",
    "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
}

# XLA leaves out roundings to a half type between its own steps, and then keeps float32 numbers in memory beside the rounded ones. With all
# roundings, as eager mode has them, BERT of 8 x 1024 tokens needs 160 MiB of temporary memory instead of 209.
_CUDA_OPTIONS = {"xla_allow_excess_precision": False}

# Kinds of commands in XLA's CUDA graphs: its default list, and convolutions, which would cut a graph into small ones. On an
# H200 (jaxlib 0.11.2, 2026-11-27, bfloat16) resnet50 takes 1.1 ms instead of 2.3 for one picture, 1.8 instead of 2.1 for 32, and a
# training step 13.7 instead of 16.1. Each list is that of some releases; of those that XLA knows, the last counts.
COMMANDS = "xla_gpu_enable_command_buffer"
WITHOUT_CONVOLUTIONS = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION"
_IN_GRAPHS = (f"{WITHOUT_CONVOLUTIONS},CONVOLUTION", f"{WITHOUT_CONVOLUTIONS},CONVOLUTION,COLLECTIVES_KERNEL")

# Sums of what is scattered to one place have one order then, and so have cuDNN's and cuBLAS's.
_DETERMINISTIC = {"xla_gpu_exclude_nondeterministic_ops": True}

# XLA's atan for vectors of 512 bits gives wrong numbers in float16, float32 and float64 (jaxlib 0.10.2 and 0.11.2). It stands for
# atan2(x, 1) as well, and so may for logarithms of complex numbers.
_NOT_WIDE = ("atan", "atan2")


# What XLA says where Triton has no tiles for a product, as for one over 8 x 197 rows that it transposes on the way (jaxlib 0.10.2, ViT's
# gradients in bfloat16). When XLA measures its choices it turns to cuBLAS itself, else it gives up.
_NO_TILES = "Couldn't find output tile sizes"
_BY_CUBLAS = {"xla_gpu_enable_triton_gemm": False}

Compiled = TypeVar("Compiled")


def with_tiles(compile: Callable[[Mapping[str, Any]], Compiled], options: Mapping[str, Any]) -> Compiled:
    """compile(options), and once more with all products by cuBLAS if XLA finds no tiles for one of them."""
    try:
        return compile(options)
    except jax.errors.JaxRuntimeError as error:
        if _NO_TILES not in str(error):
            raise
        return compile({**options, **_BY_CUBLAS})


# Seconds that a program's devices wait for each other before XLA ends the process: on a busy machine, 40 (XLA's own number) are too few.
_RENDEZVOUS = {
    "xla_cpu_collective_call_terminate_timeout_seconds": 3600,
    "xla_cpu_collective_timeout_seconds": 3600,
}


# For programs that nobody runs: code that is quick to make, in one piece.
# jaxlib 0.12 has no other emitters than MLIR's, and no option for that.
_QUICK = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def quick_options() -> Mapping[str, Any]:
    """For programs that are compiled to be looked at."""
    return _known(tuple(_QUICK.items()))


def options_for(platform: str, program: ClosedJaxpr, settings: Settings = EXACT, on_mesh: bool = False) -> Mapping[str, Any]:
    """The XLA options of a program for a platform, by name, as far as this XLA has them. settings: torch's, which the program follows.
    on_mesh: whether it runs on several devices."""
    options = default_options(platform)
    if on_mesh and platform == "cpu":
        options = {**options, **_known(tuple(_RENDEZVOUS.items()))}
    if settings.deterministic:
        options = {**options, **_DETERMINISTIC}
    if _VECTORS in options and not _may_be_wide(program.jaxpr):
        return {name: value for name, value in options.items() if name != _VECTORS}
    return options


@functools.cache
def default_options(platform: str) -> Mapping[str, Any]:
    """The XLA options of all but a few programs for a platform. What XLA_FLAGS says itself is left to it."""
    said = {word.lstrip("-").partition("=")[0] for word in os.environ.get("XLA_FLAGS", "").split()}
    wanted = tuple((name, value) for name, value in _wanted(platform) if name not in said)
    return _known(wanted) if wanted else {}


@functools.cache
def _known(wanted: tuple[tuple[str, Any], ...]) -> Mapping[str, Any]:
    """Those of these options that XLA has."""
    # All of XLA's options are known on every platform: a program for the CPU shows whether this one is.
    with jax.default_device(cpu_device()):
        trivial = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32"))
    options = {}
    for name, value in wanted:
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # no such option
            compile_lowered(trivial, cpu_device(), {name: value})
            options[name] = value
    return options


def _wanted(platform: str) -> Iterable[tuple[str, Any]]:
    """Names and values; of those of one name that XLA has, the last counts."""
    if platform == "cpu":
        wide = {_VECTORS: 512} if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else {}
        return [*_CPU_OPTIONS.items(), *wide.items()]
    return [*_CUDA_OPTIONS.items(), *((COMMANDS, kinds) for kinds in _IN_GRAPHS)] if platform == "cuda" else []


def _may_be_wide(jaxpr: Jaxpr) -> bool:
    """Whether XLA's functions for the widest vectors are right for all that a program computes."""
    return all(
        equation.primitive.name not in _NOT_WIDE
        and not _has_complex(equation)
        and all(map(_may_be_wide, _jaxprs(tuple(equation.params.values()))))
        for equation in jaxpr.eqns
    )


def _has_complex(equation: JaxprEqn) -> bool:
    return any(getattr(variable.aval, "dtype", None) in ("complex64", "complex128") for variable in (*equation.invars, *equation.outvars))


def _jaxprs(parameter: Any) -> Iterator[Jaxpr]:
    if isinstance(parameter, ClosedJaxpr):
        yield parameter.jaxpr
    elif isinstance(parameter, Jaxpr):
        yield parameter
    elif isinstance(parameter, tuple | list):
        for element in parameter:
            yield from _jaxprs(element)
