"""Ops on lists of tensors (`torch._foreach_*`, which optimizers use).

Each op applies the lowering of an op for single tensors to the elements of its lists, one after the other. An argument that is not a list
is used for all elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jax import Array, lax
from torch._ops import OpOverload

from ...runtime import private
from ...torch_ops import aten
from .. import dtypes
from ..context import Context
from ..dtypes import DType
from ..promotion import convert
from ..registry import Lowering, lowers, registry
from . import activations as activations  # these imports register the lowerings that `_single_overload` looks for
from . import comparison as comparison
from . import creation as creation
from . import matmul as matmul
from . import special as special
from .elementwise import pow_tensor_scalar
from .reductions import linalg_vector_norm, sum_


@lowers(aten._foreach_norm.Scalar)
def foreach_norm(tensors: Sequence[Array], ord: Any = 2, dtype: DType | None = None, *, ctx: Context) -> list[Array]:
    """The norm of each tensor: `linalg_vector_norm` over all elements.

    Shape:  [] for each result.
    Dtype:  the real dtype of `dtype` if given, else of the tensor.
    """
    return [linalg_vector_norm(x, ord, dtype=dtype, ctx=ctx) for x in tensors]


def _power_sum(x: Array, ord: Any, dtype: DType | None, ctx: Context) -> Array:
    """Returns sum(abs(x) ** ord), added in float32 for half types."""
    upcast = convert(x, dtypes.accumulator(dtype or x.dtype))
    total = sum_(pow_tensor_scalar(lax.abs(upcast), ord), ctx=ctx)
    return convert(total, dtypes.real(dtype or x.dtype))


@lowers(aten._foreach_powsum.Scalar)
def foreach_powsum(tensors: Sequence[Array], ord: Any = 2, dtype: DType | None = None, *, ctx: Context) -> list[Array]:
    """The sum of abs(x) ** ord over all elements x of each tensor.

    Shape:  [] for each result.
    Dtype:  the real dtype of `dtype` if given, else of the tensor.
    """
    return [_power_sum(x, ord, dtype, ctx) for x in tensors]


# By overload name of a list op: the overload names of the corresponding op for single tensors. The first one with a lowering is used.
_SINGLE_OVERLOADS = {
    "default": ("default",),
    "List": ("Tensor", "Tensor_Tensor", "default"),
    "Tensor": ("Tensor",),
    "Scalar": ("Tensor_Scalar", "Scalar", "default"),
    "ScalarList": ("Tensor_Scalar", "Scalar", "default"),
    "ScalarAndTensor": ("Scalar",),
}


def _overloads() -> Iterator[OpOverload]:
    """Yields the overloads of `_foreach_*` ops that return new tensors and have no lowering yet."""
    for name in private.op_names():
        if name.startswith("aten::_foreach_"):
            base, _, overload = name.removeprefix("aten::").partition(".")
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
            if not op._schema.is_mutable and registry.find(op) is None:
                yield op


def _single_overload(op: OpOverload) -> OpOverload | None:
    """Returns the overload for single tensors that corresponds to the list op `op`; None if no such overload has a lowering."""
    packet = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::_foreach_"), None)
    for overload in _SINGLE_OVERLOADS.get(op._overloadname, ()):
        candidate = getattr(packet, overload, None)
        if candidate is not None and registry.find(candidate) is not None:
            return candidate
    return None


def _for_each(op: OpOverload, single: OpOverload) -> Lowering:
    """Returns a lowering of the list op `op` that applies the lowering of `single` to each element."""
    takes_list = [isinstance(argument.type, torch.ListType) for argument in op._schema.arguments]
    names = [argument.name if argument.kwarg_only else None for argument in single._schema.arguments]

    def lower(ctx: Context, args: Sequence[Any], keywords: dict[str, Any]) -> list[Array]:
        lowering = registry.find(single, ctx.platform)
        assert lowering is not None, single
        count = len(args[takes_list.index(True)])
        results = []
        for index in range(count):
            element_args = [arg[index] if is_list else arg for arg, is_list in zip(args, takes_list, strict=False)]
            positional = [arg for arg, name in zip(element_args, names, strict=False) if name is None]
            named = {name: arg for arg, name in zip(element_args, names, strict=False) if name is not None}
            bound, bound_keywords = lowering.bind(tuple(positional), named | keywords)
            if lowering.takes_context:
                bound_keywords["ctx"] = ctx
            results.append(lowering.function(*bound, **bound_keywords))
        return results

    if any(argument.name == "alpha" for argument in op._schema.arguments):
        return lambda *args, alpha, ctx: lower(ctx, args, {"alpha": alpha})
    return lambda *args, ctx: lower(ctx, args, {})


for _op in _overloads():
    if (_single_op := _single_overload(_op)) is not None:
        registry.register(_op, _for_each(_op, _single_op))
