"""torch's global and thread-local settings, which a recorded program depends on."""

from __future__ import annotations

import contextlib
import decimal
import functools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ..runtime import devices, private
from .fingerprints import identity_of

_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "xla")


def global_state() -> tuple[Any, ...]:
    """Returns the settings of torch and `decimal` in this thread, comparable with earlier or later results in the same thread."""
    return (
        *_results(_MODE_QUERIES),
        tuple(map(_autocast, _AUTOCAST_DEVICES)),
        torch.is_autocast_cache_enabled(),
        _results(_BACKEND_QUERIES),
        tuple(mode.device if type(mode) is DeviceContext else identity_of(mode) for mode in _get_current_function_mode_stack()),
        tuple(identity_of(mode) for mode in _get_current_dispatch_mode_stack()),
        _saved_tensor_hooks(),
        private.functorch_level(),
        _decimal_settings(decimal.getcontext()),  # results of decimal numbers depend on these settings
    )


def _results(queries: Any) -> tuple[Any, ...]:
    return tuple(query() for query in queries)


def _matmul_precision() -> str | None:
    """Returns the float32 matmul precision. None if torch raises an error because its newer precision settings contradict this setting."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


_MODE_QUERIES = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    torch.get_default_dtype,
    torch.get_default_device,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch.is_anomaly_enabled,
    torch.is_anomaly_check_nan_enabled,
    _matmul_precision,
    private.is_forward_mode_enabled,
)


_BACKEND_QUERIES = (
    devices.current_gpu,  # the device that a plain "cuda" means
    *private.BACKEND_SETTINGS,
    *(functools.partial(private.float32_precision, backend, op) for backend, op in private.FLOAT32_PRECISIONS),
    lambda: bool(torch.get_deterministic_debug_mode()),
    lambda: torch.utils.deterministic.fill_uninitialized_memory,
    lambda: torch.__future__.get_overwrite_module_params_on_conversion(),
    lambda: torch.__future__.get_swap_module_params_on_conversion(),
)


_decimal_settings = operator.attrgetter("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _autocast(device: str) -> Any:
    try:
        return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    except RuntimeError:
        return None  # this build of torch does not have the device


def _saved_tensor_hooks() -> Any:
    hooks = private.saved_tensor_hooks()
    return None if hooks is None else tuple(map(identity_of, hooks))


@contextlib.contextmanager
def without_cached_casts() -> Iterator[None]:
    """Disables autocast's cache of cast parameters inside the context, if an autocast block is open around the step.

    A cast from before the step may be out of date, because an optimizer may have written to its parameter since. A recording must not use
    such a cast. If no autocast block is open around the step, the autocast blocks inside the step use the cache as in eager mode.
    """
    if not any(state[0] for device in _AUTOCAST_DEVICES if (state := _autocast(device))):
        yield
        return
    before = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()
