"""XLA's own options for a program. dynaxla's choices were measured; see docs/benchmarks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import torch
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

from ..artifact.xla_options import CPU_OPTIONS, not_set_by_user, supported_options
from ..lowering.settings import EXACT, Settings
from ..runtime.clients import cpu_device
from ..runtime.programs import compile_lowered

_VECTOR_WIDTH = "xla_cpu_prefer_vector_width"

# The memory-optimized scheduler is no slower than the default, and needs up to half less memory for the intermediates of a training step.
_CPU_OPTIONS = {**CPU_OPTIONS, "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}

# With excess precision, XLA skips roundings to float16 or bfloat16 between its own ops, and then keeps float32 values in memory next to the
# rounded ones. Without it XLA rounds after each op, as eager mode does, and BERT of 8 x 1024 tokens needs 160 MiB of temporary memory
# instead of 209.
_CUDA_OPTIONS = {"xla_allow_excess_precision": False}

# This option lists the kinds of commands that XLA puts into CUDA graphs: XLA's default kinds, and convolutions, which would otherwise split
# a CUDA graph into small ones. On an H200 (jaxlib 0.11.2, 2026-11-27, bfloat16) resnet50 takes 1.1 ms instead of 2.3 for one image, 1.8 ms
# instead of 2.1 for 32 images, and 13.7 ms instead of 16.1 for a training step. Releases of XLA accept different kinds, so there are
# several lists, and the last one that XLA accepts is used.
COMMAND_BUFFER_OPTION = "xla_gpu_enable_command_buffer"
WITHOUT_CONVOLUTIONS = "CONDITIONAL,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,DYNAMIC_SLICE_FUSION,FUSION"
_COMMAND_KINDS = (f"{WITHOUT_CONVOLUTIONS},CONVOLUTION", f"{WITHOUT_CONVOLUTIONS},CONVOLUTION,COLLECTIVES_KERNEL")

# For `torch.use_deterministic_algorithms`: makes XLA choose algorithms with a fixed order of additions, in scatters, cuDNN and cuBLAS.
_DETERMINISTIC = {"xla_gpu_exclude_nondeterministic_ops": True}

# XLA:CPU's atan for vectors of 512 bits returns wrong values in float16, float32 and float64 (jaxlib 0.10.2 and 0.11.2). XLA also uses it
# for atan2(x, 1), and possibly for logarithms of complex numbers. So programs with these primitives, or with complex numbers, get narrower
# vectors.
_WRONG_WITH_WIDE_VECTORS = ("atan", "atan2")


# The text of XLA's error if Triton finds no tile sizes for a matmul, such as one over 8 x 197 rows with a fused transpose (jaxlib 0.10.2,
# ViT's gradients in bfloat16). With autotuning, XLA itself then uses cuBLAS; without autotuning, the compilation fails.
_NO_TILES_ERROR = "Couldn't find output tile sizes"
_CUBLAS_ONLY = {"xla_gpu_enable_triton_gemm": False}

Compiled = TypeVar("Compiled")


def compile_with_cublas_fallback(compile: Callable[[Mapping[str, Any]], Compiled], options: Mapping[str, Any]) -> Compiled:
    """Returns compile(options). If XLA finds no tile sizes for a matmul, compile is called again with all matmuls on cuBLAS."""
    try:
        return compile(options)
    except jax.errors.JaxRuntimeError as error:
        if _NO_TILES_ERROR not in str(error):
            raise
        return compile({**options, **_CUBLAS_ONLY})


# For programs on several CPU devices: the seconds for which the devices wait for each other at a collective before XLA ends the process.
# XLA's default of 40 s is too short on a busy machine.
_RENDEZVOUS_TIMEOUTS = {
    "xla_cpu_collective_call_terminate_timeout_seconds": 3600,
    "xla_cpu_collective_timeout_seconds": 3600,
}


# For programs that are compiled for inspection and never run: options with which XLA:CPU compiles fastest. (jaxlib 0.12 always uses fusion
# emitters, and has no such option.)
_FAST_COMPILATION = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,
}


def quick_options() -> Mapping[str, Any]:
    """Returns options for fast compilation of programs that never run."""
    return _supported_options(tuple(_FAST_COMPILATION.items()))


def options_for(platform: str, program: ClosedJaxpr, settings: Settings = EXACT, on_mesh: bool = False) -> Mapping[str, Any]:
    """Returns XLA's options for a program, by name.

    Args:
        platform: The platform on which the program runs.
        program: The program's jaxpr.
        settings: torch's settings, which the program follows.
        on_mesh: True if the program runs on several devices.
    """
    options = default_options(platform)
    if on_mesh and platform == "cpu":
        options = {**options, **_supported_options(tuple(_RENDEZVOUS_TIMEOUTS.items()))}
    if settings.deterministic:
        options = {**options, **_supported_options(tuple(_DETERMINISTIC.items()))}
    if _VECTOR_WIDTH in options and not _supports_wide_vectors(program.jaxpr):
        return {name: value for name, value in options.items() if name != _VECTOR_WIDTH}
    return options


@functools.cache
def default_options(platform: str) -> Mapping[str, Any]:
    """Returns XLA's options for most programs on a platform, without options that XLA_FLAGS sets or that the installed XLA lacks."""
    candidates = tuple(not_set_by_user(_candidates(platform)))
    return _supported_options(candidates) if candidates else {}


@functools.cache
def _supported_options(candidates: tuple[tuple[str, Any], ...]) -> Mapping[str, Any]:
    """See `supported_options`. The small program is compiled for the CPU."""
    with jax.default_device(cpu_device()):
        trivial = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((), "float32"))
    return supported_options(candidates, functools.partial(compile_lowered, trivial, cpu_device()))


def _candidates(platform: str) -> Iterable[tuple[str, Any]]:
    """Returns dynaxla's options for a platform, as pairs of name and value for `_supported_options`."""
    if platform == "cpu":
        wide = {_VECTOR_WIDTH: 512} if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else {}
        return [*_CPU_OPTIONS.items(), *wide.items()]
    return [*_CUDA_OPTIONS.items(), *((COMMAND_BUFFER_OPTION, kinds) for kinds in _COMMAND_KINDS)] if platform == "cuda" else []


def _supports_wide_vectors(jaxpr: Jaxpr) -> bool:
    """True if XLA:CPU's functions for vectors of 512 bits are correct for all operations of a program."""
    return all(
        equation.primitive.name not in _WRONG_WITH_WIDE_VECTORS
        and not _has_complex(equation)
        and all(map(_supports_wide_vectors, _jaxprs(tuple(equation.params.values()))))
        for equation in jaxpr.eqns
    )


def _has_complex(equation: JaxprEqn) -> bool:
    """True if an operand or result of the equation is complex."""
    return any(getattr(variable.aval, "dtype", None) in ("complex64", "complex128") for variable in (*equation.invars, *equation.outvars))


def _jaxprs(parameter: Any) -> Iterator[Jaxpr]:
    """Yields the jaxprs in a parameter of an equation, such as the body of a loop."""
    if isinstance(parameter, ClosedJaxpr):
        yield parameter.jaxpr
    elif isinstance(parameter, Jaxpr):
        yield parameter
    elif isinstance(parameter, tuple | list):
        for element in parameter:
            yield from _jaxprs(element)
