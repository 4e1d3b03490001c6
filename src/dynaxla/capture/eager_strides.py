"""Gives the results of a traced op the strides that they have in eager mode.

A trace takes strides from the fake implementation of an op, or from the op's decomposition. Both can differ from the strides of the op's
kernel if operands are not contiguous. So the kernel itself is tried on new tensors with the operands' memory order (kernel_refusals.py has
similar trials for dtypes), and the strides of its results are cached. Large operands are replaced by smaller tensors. If a traced result
has another memory order than the kernel's result, the trace copies the traced result to the kernel's order. In XLA, such a copy only
changes the layout of the returned array.
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

# Parts of the names of ops whose kernels are not tried: kernels that interpret weights as pointers, kernels that need lengths that match
# each other, and ops that compute nothing.
_UNTRIED_NAMES = re.compile(
    "mkldnn|quant|fbgemm|pack|sparse|nested|jagged|cudnn|miopen|rnn|lstm|gru|cslt|ctc|assert|functional_sym|pin_memory|empty"
)

# A kernel is tried with the operands' own sizes if operands and results have at most this many elements, else with smaller sizes.
_MAX_ELEMENTS = 1 << 16
# The same limit for a kernel that may not check its numeric arguments, or that refuses small sizes (`kernel_refusals.is_untried`). Such a
# kernel must not be tried with smaller sizes, because the arguments may not match them. Ops in `flop_registry` (products, convolutions) are
# excluded: with so many elements they take too long.
_MAX_ELEMENTS_UNCHECKED = 1 << 24
# A trial with smaller sizes cuts longer dimensions to the first of these sizes. If the kernel refuses the operands, the second is tried.
_SHORT_SIZES = (4, 8)

# The maximum number of cached results.
_MAX_CACHED = 4096
# The sizes and strides of a kernel's results, or of the fake implementation's, by op, arguments, and sizes and strides of the operands.
_cached_results: dict[Any, Any] = {}


def with_eager_strides(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Returns the traced result of an op (a tensor or a structure of tensors) with the strides that the op's kernel gives."""
    if forks.has_lost_xla() or not _can_be_tried(op):  # in a forked child, kernels that wait for threads would not return
        return result
    operands = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not any(x.dim() > 1 and not is_contiguous_or_false(x) for x in operands if x.layout == torch.strided):
        return result
    orders = _orders_to_copy(op, args, kwargs, result, operands)
    if orders is None:
        return result
    leaves, spec = pytree.tree_flatten(result)
    return pytree.tree_unflatten([_copied_to_order(leaf, order) for leaf, order in zip(leaves, orders, strict=True)], spec)


@functools.cache
def _can_be_tried(op: OpOverload) -> bool:
    """True if an op returns only new tensors, and its kernel can be tried without side effects."""
    if op.namespace not in ("aten", "prims") or op.is_view or op._schema.is_mutable or _UNTRIED_NAMES.search(op._schema.name):
        return False
    if any(item.alias_info is not None for item in op._schema.returns):
        return False
    if torch.Tag.nondeterministic_seeded in op.tags and kernel_refusals.with_generator(op) is None:
        return False  # the trial would draw from torch's own generator
    return bool(op._schema.returns)


def _copied_to_order(result: Any, order: tuple[int, ...] | None) -> Any:
    """Returns a copy of a tensor with this order of dimensions in memory. Returns the tensor itself if `order` is None."""
    if order is None:
        return result
    inverse = sorted(range(len(order)), key=order.__getitem__)
    # `permute` returns a view. The second clone keeps the strides, and is a new tensor, as the results of the op are.
    return result.permute(order).clone(memory_format=torch.contiguous_format).permute(inverse).clone()


def _orders_to_copy(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, operands: Sequence[torch.Tensor]
) -> list[tuple[int, ...] | None] | None:
    """Returns, for each result, the memory order of the kernel's result if the traced result has another order, else None.

    Returns None if no result needs another order.
    """
    results = pytree.tree_leaves(result)
    tensors = [*operands, *(leaf for leaf in results if isinstance(leaf, torch.Tensor))]
    if not all(x.device.type == "cpu" and x.layout == torch.strided and dtypes.is_supported(x.dtype) for x in tensors):
        return None
    specs = [_sizes_and_strides(x) for x in tensors]
    if any(spec is None for spec in specs):
        return None
    elements = sum(math.prod(spec[0]) for spec in specs if spec is not None)
    traced = [_sizes_and_strides(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in results]
    # kernel_refusals.py does not try these ops, because their kernels may not check their arguments, or refuse small sizes. Here such a
    # kernel is tried, but only with the operands' own sizes, which its arguments match.
    is_unchecked = kernel_refusals.is_untried(op)
    if elements <= _MAX_ELEMENTS or (is_unchecked and elements <= _MAX_ELEMENTS_UNCHECKED and op.overloadpacket not in flop_registry):
        return _differing_orders(traced, _trial_result(op, args, kwargs, None))
    if is_unchecked:
        return None
    for max_size in _SHORT_SIZES:
        if (from_kernel := _trial_result(op, args, kwargs, max_size)) is None:
            continue
        if _differing_orders(traced, from_kernel) is None:
            return None
        if _differing_orders(_trial_result(op, args, kwargs, max_size, fake=True), from_kernel) is None:
            # With short sizes, no memory order of the fake implementation is known to differ from the kernel's. So the fake
            # implementation's order for the real sizes is taken as the kernel's.
            return _differing_orders(traced, _from_fake_implementation(op, args, kwargs))
        return _differing_orders(traced, from_kernel)
    return None


# A tensor's sizes and strides.
_SizesStrides = tuple[tuple[int, ...], tuple[int, ...]]


def _sizes_and_strides(x: torch.Tensor) -> _SizesStrides | None:
    """Returns a tensor's sizes and strides as ints. A symbol's hint, its value in the traced call, replaces the symbol.

    Returns None if a symbol has no hint.
    """
    sizes, strides = [_number(size) for size in x.shape], [_number(step) for step in x.stride()]
    if any(number is None for number in (*sizes, *strides)):
        return None
    return tuple(sizes), tuple(strides)


def _number(value: Any) -> Any:
    """Returns the hint of a symbolic number, and any other value as it is."""
    return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _differing_orders(
    traced: Sequence[_SizesStrides | None] | None, expected: Sequence[_SizesStrides | None] | None
) -> list[tuple[int, ...] | None] | None:
    """Returns, for each result, its memory order in `expected` if this order differs from the order in `traced`, else None.

    Returns None if no order differs, if a trial was refused (an argument is None), or if the numbers of results differ.
    Only the strides of dimensions with more than one element are compared.
    """
    if traced is None or expected is None or len(traced) != len(expected):
        return None
    orders = [
        None if traced_spec is None or expected_spec is None else _differing_order(traced_spec, expected_spec)
        for traced_spec, expected_spec in zip(traced, expected, strict=True)
    ]
    return orders if any(order is not None for order in orders) else None


def _differing_order(traced: _SizesStrides, expected: _SizesStrides) -> tuple[int, ...] | None:
    """Returns the memory order of `expected` if the traced strides are not the dense strides of this order, else None.

    Returns None, too, if `expected` is not dense, if the traced tensor has no elements, or if the tensors differ in their numbers of
    dimensions or in the dimensions that have more than one element.
    """
    (sizes, strides), (expected_sizes, _) = traced, expected
    if len(sizes) != len(expected_sizes) or any(
        (size > 1) != (expected_size > 1) for size, expected_size in zip(sizes, expected_sizes, strict=True)
    ):
        return None
    order = _dense_order(expected)
    if order is None or 0 in sizes:
        return None
    dense_strides, step = [0] * len(sizes), 1
    for dim in reversed(order):
        dense_strides[dim], step = step, step * sizes[dim]
    has_order = all(size <= 1 or stride == dense_stride for size, stride, dense_stride in zip(sizes, strides, dense_strides, strict=True))
    return None if has_order else order


def _dense_order(spec: _SizesStrides) -> tuple[int, ...] | None:
    """Returns the dimensions from the outermost in memory to the innermost; None for a tensor with gaps or overlaps."""
    sizes, strides = spec
    order = sorted(range(len(sizes)), key=lambda dim: (-strides[dim], -sizes[dim]))
    step = 1
    for dim in reversed(order):
        if sizes[dim] > 1 and strides[dim] != step:
            return None
        step *= sizes[dim]
    return tuple(order)


def _trial_result(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], max_size: int | None, fake: bool = False
) -> list[_SizesStrides | None] | None:
    """Returns the sizes and strides of a trial's results, None in the place of a result that is no tensor. Cached.

    Returns None if the kernel, or the fake implementation, refuses the operands.

    Args:
        op, args, kwargs: the traced call.
        max_size: the size to which longer dimensions are cut; None for the operands' own sizes.
        fake: True to run torch's fake implementation instead of the kernel.
    """
    key = (op, _key(args, max_size), _key(dict(kwargs), max_size), fake)
    if key not in _cached_results:
        if len(_cached_results) >= _MAX_CACHED:
            _cached_results.clear()
        _cached_results[key] = _run_trial(op, args, kwargs, max_size, fake)
    result: list[_SizesStrides | None] | None = _cached_results[key]
    return result


def _key(value: Any, max_size: int | None) -> Any:
    if isinstance(value, torch.Tensor):
        spec = _sizes_and_strides(value)
        return value.dtype, spec if spec is None else _shortened(spec, max_size)
    if isinstance(value, (list, tuple)):
        return tuple(_key(item, max_size) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item, max_size)) for name, item in value.items())
    return repr(_number(value))


def _shortened(spec: _SizesStrides, max_size: int | None) -> _SizesStrides | None:
    """Returns sizes of at most `max_size`, and strides with the same memory order, and with gaps and broadcasts in the same dimensions.

    Returns the spec itself if `max_size` is None. Returns None if a stride other than 0 is less than the memory span of the dimensions with
    smaller strides.
    """
    sizes, strides = spec
    if max_size is None:
        return spec
    shorter = [min(size, max_size) for size in sizes]
    short_strides, dense, short_dense = [0] * len(sizes), 1, 1  # `dense`: the stride of the next dimension if there is no gap
    for dim in sorted(range(len(sizes)), key=lambda dim: (strides[dim], sizes[dim])):
        if not strides[dim]:
            continue
        if strides[dim] < dense:
            return None
        short_strides[dim] = short_dense if strides[dim] == dense else 2 * short_dense
        dense, short_dense = strides[dim] * sizes[dim], short_strides[dim] * shorter[dim]
    return tuple(shorter), tuple(short_strides)


def _run_trial(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], max_size: int | None, fake: bool
) -> list[_SizesStrides | None] | None:
    """Runs a kernel or fake implementation and returns the sizes and strides of the results; None if the op refuses the operands."""
    generator = torch.Generator().manual_seed(0)

    def trial_value(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return _number(value)
        spec = _sizes_and_strides(value)
        short = None if spec is None else _shortened(spec, max_size)
        if short is None:
            raise ValueError("the traced strides are not known, or have no equivalent for shorter sizes")
        sizes, strides = short
        length = 1 + sum((size - 1) * step for size, step in zip(sizes, strides, strict=True)) if 0 not in sizes else 0
        flat = torch.zeros(length, dtype=value.dtype)  # zeros are valid as indices, too
        if value.dtype.is_floating_point and value.dtype.itemsize > 1:
            flat.uniform_(generator=generator)
        return flat.as_strided(sizes, strides)

    def results() -> Any:
        trial_args, trial_kwargs = pytree.tree_map(trial_value, (tuple(args), dict(kwargs)))
        if fake:
            with FakeTensorMode() as mode:
                trial_args, trial_kwargs = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (trial_args, trial_kwargs))
                return op(*trial_args, **trial_kwargs)
        if torch.Tag.nondeterministic_seeded not in op.tags:
            return op(*trial_args, **trial_kwargs)
        seeded_op = kernel_refusals.with_generator(op)
        assert seeded_op is not None
        return seeded_op(*trial_args, **trial_kwargs | {"generator": generator})

    with _disable_current_modes(), private.below_autograd(), torch.no_grad():
        for _ in range(2):
            try:
                return [_sizes_and_strides(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(results())]
            except Warning:  # the user's filter made a warning an error; torch emits most warnings only once, so the second try succeeds
                continue
            except Exception:  # the kernel does not accept these operands
                return None
    return None


def _from_fake_implementation(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[_SizesStrides | None] | None:
    """Returns the sizes and strides that the op's fake implementation gives for the traced operands."""
    with disable_functional_mode(), disable_proxy_modes_tracing():

        def value(x: Any) -> Any:
            return private.functional_value(x) if isinstance(x, FunctionalTensor) else x

        fake_args, fake_kwargs = pytree.tree_map_only(torch.Tensor, value, (tuple(args), dict(kwargs)))
        if not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((fake_args, fake_kwargs))):
            return None
        results = op(*fake_args, **fake_kwargs)
        return [_sizes_and_strides(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in pytree.tree_leaves(results)]
