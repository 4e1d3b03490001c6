"""`torch.autocast("jax")`, with the policies of autocast on the CPU.

The policy of an op decides if the op runs in the lower-precision dtype, in float32, or in the widest dtype among its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..runtime import private
from . import storages

# The ops with the policies lower_precision_fp and promote. All others have the policy fp32. Source: ATen/autocast_mode.cpp, AutocastCPU
_LOWER_PRECISION = frozenset([
    "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "_convolution", "mm", "bmm",
    "addmm", "addbmm", "baddbmm", "_addmm_activation", "linear", "matmul", "linalg_vecdot", "prelu", "scaled_dot_product_attention",
    "mkldnn_rnn_layer", "_native_multi_head_attention",
])  # fmt: skip
_PROMOTE = frozenset(["stack", "cat", "index_copy"])


def supported_dtypes() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def _map_tensors(value: Any, cast: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Maps `cast` over the tensors in an argument that `_is_eligible` accepts."""
    if isinstance(value, torch.Tensor):
        return cast(value) if _is_eligible(value) else value
    return type(value)([_map_tensors(item, cast) for item in value]) if type(value) in (list, tuple) else value


def _is_eligible(tensor: torch.Tensor) -> bool:
    """True if autocast may cast the tensor. Source: ATen/autocast_mode.h, is_eligible"""
    return storages.is_jax_tensor(tensor) and tensor.dtype.is_floating_point and tensor.dtype != torch.float64


def _promoted_dtype(values: Iterable[Any]) -> torch.dtype:
    """Returns float32 if an eligible operand has it, else the lower-precision dtype. Source: ATen/autocast_mode.h, prioritize"""
    lower = torch.get_autocast_dtype(storages.NAME)
    flat = [item for value in values for item in (value if isinstance(value, (list, tuple)) else (value,))]
    found = {item.dtype for item in flat if isinstance(item, torch.Tensor) and _is_eligible(item)}
    if torch.float32 in found:
        return torch.float32
    if found - {lower}:
        raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return lower


def _kernel(op: Any, dtype_of: Callable[[Iterable[Any]], torch.dtype]) -> Callable[..., Any]:
    """Returns an autocast kernel that casts eligible tensors to the dtype that `dtype_of` returns for the list of all arguments."""

    def run(*args: Any, **kwargs: Any) -> Any:
        dtype = dtype_of([*args, *kwargs.values()])
        with private.without_autocast():
            cast_args = _map_tensors(args, lambda tensor: tensor.to(dtype))
            cast_kwargs = {name: _map_tensors(value, lambda tensor: tensor.to(dtype)) for name, value in kwargs.items()}
            return op(*cast_args, **cast_kwargs)

    return run


def register(library: torch.library.Library) -> None:
    """Registers an autocast kernel for each op that has one on the CPU. `library` is for the namespace aten."""
    for op in private.ops_with_kernel("AutocastCPU"):
        name = op._schema.name.removeprefix("aten::")
        if name in _LOWER_PRECISION:
            kernel = _kernel(op, lambda _: torch.get_autocast_dtype(storages.NAME))
        else:
            kernel = _kernel(op, _promoted_dtype if name in _PROMOTE else lambda _: torch.float32)
        library.impl(op, kernel, private.PRIVATEUSE1_AUTOCAST_KEY)
