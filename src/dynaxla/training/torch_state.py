"""torch's own switches, which a recorded program depends on."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .contents import same

_AUTOCAST = ("cpu", "cuda", "mps", "xpu", "hpu", "xla")


def global_state() -> tuple[Any, ...]:
    """Comparable with that of another time, in the same thread."""
    return (
        *_asked(_ALWAYS),
        tuple(map(_autocast, _AUTOCAST)),
        torch.is_autocast_cache_enabled(),
        _asked(_BACKENDS),
        tuple(mode.device if type(mode) is DeviceContext else same(mode) for mode in _get_current_function_mode_stack()),
        tuple(same(mode) for mode in _get_current_dispatch_mode_stack()),
        _saved_tensor_hooks(),
        _functorch(),
    )


def _asked(questions: Any) -> tuple[Any, ...]:
    return tuple(question() for question in questions)


_ALWAYS = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.get_default_dtype,
    torch.get_default_device,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch.is_anomaly_enabled,
    torch.is_anomaly_check_nan_enabled,
    torch.get_float32_matmul_precision,
    torch._C._is_fwd_grad_enabled,
)


def _readers(module: Any, *names: str) -> list[Any]:
    """What gives these settings, of those that this version of torch has."""
    return [found for name in names if callable(found := getattr(module, name, None))]


_BACKENDS = (
    *_readers(
        torch._C,
        "_get_cudnn_enabled",
        "_get_cudnn_benchmark",
        "_get_cudnn_deterministic",
        "_get_cudnn_allow_tf32",
        "_get_cublas_allow_tf32",
        "_get_cublas_allow_fp16_reduced_precision_reduction",
        "_get_cublas_allow_bf16_reduced_precision_reduction",
        "_get_cublas_allow_fp16_accumulation",
        "_get_mkldnn_enabled",
        "_get_mkldnn_deterministic",
        "_get_onednn_allow_tf32",
        "_get_flash_sdp_enabled",
        "_get_mem_efficient_sdp_enabled",
        "_get_math_sdp_enabled",
        "_get_math_sdp_allow_fp16_bf16_reduction",
        "_get_cudnn_sdp_enabled",
        "_get_overrideable_sdp_enabled",
        "_get_nnpack_enabled",
        "_get_linalg_preferred_backend",
        "_get_blas_preferred_backend",
        "_is_default_mobile_cpu_allocator_set",
    ),
    lambda: bool(torch.get_deterministic_debug_mode()),
    lambda: torch.utils.deterministic.fill_uninitialized_memory,
    lambda: torch.__future__.get_overwrite_module_params_on_conversion(),
    lambda: torch.__future__.get_swap_module_params_on_conversion(),
)


def _autocast(device: str) -> Any:
    try:
        return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    except RuntimeError:
        return None  # a device that this build does not know


def _saved_tensor_hooks() -> Any:
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    found = top(True) if top is not None else None
    return None if found is None else tuple(map(same, found))


def _functorch() -> Any:
    depth = getattr(torch._C._functorch, "maybe_current_level", None)
    return depth() if depth is not None else None
