"""Gives the results of a traced op the strides that they have in eager mode.

A trace takes strides from the fake implementation of an op, or from the ops that the op is decomposed into. Both can differ from the op's
kernel when operands are not contiguous. So the kernel itself runs once, on small tensors with the operands' memory order, as
kernel_refusals.py does for dtypes. If a traced result has another order than the kernel's, the trace copies it to the kernel's order. In
XLA, such a copy only changes the layout of the returned array.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._prims_common import is_contiguous_or_false
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, disable_functional_mode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.flop_counter import flop_registry

from .. import forks
from ..lowering import dtypes, kernel_refusals
from ..runtime import private

# Kernels that interpret weights as pointers, or need lengths that match each other, and ops that compute nothing. These are not tried.
_OPAQUE = re.compile(
    "mkldnn|quant|fbgemm|pack|sparse|nested|jagged|cudnn|miopen|rnn|lstm|gru|cslt|ctc|assert|functional_sym|pin_memory|empty"
)

# A kernel is tried with the operands' own sizes if operands and results have at most so many elements, else with smaller ones.
_FEW = 1 << 16
# The limit for a kernel that does not check its numeric arguments, and so can only be tried with operands that match them. Products and
# convolutions are excluded: with so many elements they take too long.
_MOST = 1 << 24
# The sizes that longer dimensions are cut to, where a kernel is tried with fewer elements.
_SHORT = (4, 8)

# The most answers that are cached.
_REMEMBERED = 4096
# The sizes and strides of results, by op, arguments, sizes and strides of the operands, and kernel or fake implementation.
_known: dict[Any, Any] = {}


def as_in_eager_mode(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Returns the traced result of an op, one or several, with the strides that the op's kernel gives it."""
    if forks.is_cut_off() or not _has_order(op):  # kernels with threads, which a forked child lacks, would not return
        return result
    operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not any(x.dim() > 1 and not is_contiguous_or_false(x) for x in operands if x.layout == torch.strided):
        return result
    wanted = _wanted(op, args, kwargs, result, operands)
    if wanted is None:
        return result
    leaves, spec = pytree.tree_flatten(result)
    return pytree.tree_unflatten([_laid_out(leaf, order) for leaf, order in zip(leaves, wanted, strict=True)], spec)


@functools.cache
def _has_order(op: OpOverload) -> bool:
    """True for an op that returns new tensors and whose kernel can be tried for their strides."""
    if op.namespace not in ("aten", "prims") or op.is_view or op._schema.is_mutable or _OPAQUE.search(op._schema.name):
        return False
    if any(item.alias_info is not None for item in op._schema.returns):
        return False
    if torch.Tag.nondeterministic_seeded in op.tags and kernel_refusals.with_generator(op) is None:
        return False  # it would draw from torch's own generator
    return bool(op._schema.returns)


def _laid_out(result: Any, order: tuple[int, ...] | None) -> Any:
    """Returns a tensor copied to this order of dimensions in memory; None leaves it as it is."""
    if order is None:
        return result
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return result.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse).clone()


def _wanted(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, operands: Sequence[torch.Tensor]
) -> list[tuple[int, ...] | None] | None:
    """Returns, for each result, its dimension order in the kernel's memory where the trace has another one, else None.

    Returns None if no result needs another order.
    """
    results = pytree.tree_leaves(result)
    tensors = [*operands, *(leaf for leaf in results if isinstance(leaf, torch.Tensor))]
    if not all(x.device.type == "cpu" and x.layout == torch.strided and dtypes.is_supported(x.dtype) for x in tensors):
        return None
    lie = [_numbers(x) for x in tensors]
    if any(spec is None for spec in lie):
        return None
    elements = sum(math.prod(spec[0]) for spec in lie if spec is not None)
    traced = [_numbers(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in results]
    trusts = kernel_refusals.trusts(op)
    if elements <= _FEW or (trusts and elements <= _MOST and op.overloadpacket not in flop_registry):
        return _compared(traced, _by_kernel(op, args, kwargs, None))
    if trusts:
        return None
    for most in _SHORT:
        if (found := _by_kernel(op, args, kwargs, most)) is None:
            continue
        if _compared(traced, found) is None:
            return None
        if _compared(_by_kernel(op, args, kwargs, most, fake=True), found) is None:
            # The fake implementation agrees with the kernel for small operands: take its answer for the real ones, not the decomposition's.
            return _compared(traced, _without_decomposition(op, args, kwargs))
        return _compared(traced, found)
    return None


# A tensor's sizes and strides.
_Lie = tuple[tuple[int, ...], tuple[int, ...]]


def _numbers(x: torch.Tensor) -> _Lie | None:
    """Returns sizes and strides as numbers, with the hints of the traced call for symbols; None if one has no hint."""
    sizes, strides = [_number(size) for size in x.shape], [_number(step) for step in x.stride()]
    if any(number is None for number in (*sizes, *strides)):
        return None
    return tuple(sizes), tuple(strides)


def _number(value: Any) -> Any:
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _compared(traced: Sequence[_Lie | None] | None, found: Sequence[_Lie | None] | None) -> list[tuple[int, ...] | None] | None:
    """Returns, for each result, the order in `found` where it differs from the one in `traced`, else None; None if no order differs.

    Only the strides of dimensions with more than one element are compared.
    """
    if traced is None or found is None or len(traced) != len(found):
        return None
    wanted = [None if one is None or other is None else _other_order(one, other) for one, other in zip(traced, found, strict=True)]
    return wanted if any(order is not None for order in wanted) else None


def _other_order(traced: _Lie, found: _Lie) -> tuple[int, ...] | None:
    (sizes, strides), (found_sizes, _) = traced, found
    if len(sizes) != len(found_sizes) or any((size > 1) != (other > 1) for size, other in zip(sizes, found_sizes, strict=True)):
        return None
    order = _dense_order(found)
    if order is None or 0 in sizes:
        return None
    expected, step = [0] * len(sizes), 1
    for dim in reversed(order):
        expected[dim], step = step, step * sizes[dim]
    same = all(size <= 1 or mine == theirs for size, mine, theirs in zip(sizes, strides, expected, strict=True))
    return None if same else order


def _dense_order(lie: _Lie) -> tuple[int, ...] | None:
    """Returns the dimensions from the slowest in memory to the fastest; None for a tensor with gaps or overlaps."""
    sizes, strides = lie
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], -sizes[dim]))
    step = 1
    for dim in reversed(order):
        if sizes[dim] > 1 and strides[dim] != step:
            return None
        step *= sizes[dim]
    return tuple(order)


def _by_kernel(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], most: int | None, fake: bool = False
) -> list[_Lie | None] | None:
    """Returns the sizes and strides of the kernel's results; None if the kernel does not accept such operands.

    Args:
        op, args, kwargs: the traced call.
        most: the size that longer dimensions are cut to; None for the operands' own sizes.
        fake: True to run torch's fake implementation instead of the kernel.
    """
    key = (op, _key(args, most), _key(dict(kwargs), most), fake)
    if key not in _known:
        if len(_known) >= _REMEMBERED:
            _known.clear()
        _known[key] = _ask(op, args, kwargs, most, fake)
    found: list[_Lie | None] | None = _known[key]
    return found


def _key(value: Any, most: int | None) -> Any:
    if isinstance(value, torch.Tensor):
        lie = _numbers(value)
        return value.dtype, lie if lie is None else _short(lie, most)
    if isinstance(value, (list, tuple)):
        return tuple(_key(item, most) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item, most)) for name, item in value.items())
    return repr(_number(value))


def _short(lie: _Lie, most: int | None) -> _Lie | None:
    """Returns sizes of at most `most`, with strides of the same order, gaps and broadcasts. None if dimensions overlap in another way."""
    sizes, strides = lie
    if most is None:
        return lie
    shorter = [min(size, most) for size in sizes]
    made, before, now = [0] * len(sizes), 1, 1
    for dim in sorted(range(len(sizes)), key=lambda dim: (strides[dim], sizes[dim])):
        if not strides[dim]:
            continue
        if strides[dim] < before:
            return None
        made[dim] = now if strides[dim] == before else 2 * now
        before, now = strides[dim] * sizes[dim], made[dim] * shorter[dim]
    return tuple(shorter), tuple(made)


def _ask(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], most: int | None, fake: bool) -> list[_Lie | None] | None:
    generator = torch.Generator().manual_seed(0)

    def small(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return _number(value)
        lie = _numbers(value)
        short = None if lie is None else _short(lie, most)
        if short is None:
            raise ValueError("no such tensor")
        sizes, strides = short
        extent = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True)) if 0 not in sizes else 0
        flat = torch.zeros(extent, dtype=value.dtype)  # zeros are valid as indices, too
        if value.dtype.is_floating_point and value.dtype.itemsize > 1:
            flat.uniform_(generator=generator)
        return flat.as_strided(sizes, strides)

    def results() -> Any:
        given, named = pytree.tree_map(small, (tuple(args), dict(kwargs)))
        if fake:
            with FakeTensorMode() as mode:
                given, named = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (given, named))
                return op(*given, **named)
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return op(*given, **named)
        drawing = kernel_refusals.with_generator(op)
        assert drawing is not None
        return drawing(*given, **named | {"generator": generator})

    with _disable_current_modes(), private.below_autograd(), torch.no_grad():
        for _ in range(2):
            try:
                return [_numbers(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(results())]
            except Warning:  # the user's filter made it an error; torch emits most warnings only once, so try again
                continue
            except Exception:  # the kernel does not accept these operands
                return None
    return None


def _without_decomposition(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_Lie | None] | None:
    """Returns the sizes and strides that the op's fake implementation gives for the traced operands."""
    with disable_functional_mode(), disable_proxy_modes_tracing():

        def value(x: Any) -> Any:
            return private.functional_value(x) if isinstance(x, FunctionalTensor) else x

        given, named = pytree.tree_map_only(torch.Tensor, value, (tuple(args), dict(kwargs)))
        if not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((given, named))):
            return None
        results = op(*given, **named)
        return [_numbers(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(results)]
