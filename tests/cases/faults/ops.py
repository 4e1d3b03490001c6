"""Faults in lowerings, in results and their memory, and in inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
import torch
from jax import numpy as jnp
from torch._guards import TracingContext

from dynaxla import backend
from dynaxla.buffers import lost_writes, native
from dynaxla.buffers.arguments import Arguments
from dynaxla.capture.graph import AtenGraph
from dynaxla.capture.inputs import Sizes
from dynaxla.engine.scheduler import Scheduler
from dynaxla.lowering import dtypes, promotion, registry
from dynaxla.lowering.ops import division
from dynaxla.runtime import seeds
from dynaxla.runtime.layout import Layout, row_major

from . import Fault, FaultList

aten = torch.ops.aten
Lowering = Callable[..., Any]

FAULTS = FaultList()


def lowered(*ops: torch._ops.OpOverload) -> Callable[[Callable[..., Any]], Fault]:
    """Registers a wrong lowering of `ops`: a function of the original lowering and its arguments."""

    def decorate(function: Callable[..., Any]) -> Fault:
        def planted() -> AbstractContextManager[Any]:
            return _replaced({op: _wrong(function, op) for op in ops})

        planted.__name__ = function.__name__
        planted.__doc__ = function.__doc__
        return FAULTS.add(planted)

    return decorate


def _wrong(function: Callable[..., Any], op: torch._ops.OpOverload) -> Lowering:
    rule = registry.find(op)
    assert rule is not None, op
    original = rule.function
    return lambda *args, **kwargs: function(original, *args, **kwargs)


def _replaced(functions: dict[torch._ops.OpOverload, Lowering]) -> AbstractContextManager[Any]:
    rules = registry._rules
    changed = {(op, None): dataclasses.replace(rules[op, None], function=function) for op, function in functions.items()}
    return patch.dict(rules, changed)


# Mutations, aliases, memory


@FAULTS.add
def mutation_of_an_input_is_lost() -> AbstractContextManager[Any]:
    original = Scheduler.runner

    def runner(self: Scheduler, aten: AtenGraph) -> Any:
        graph = aten.module
        context = TracingContext.try_get()
        metadata = context.fw_metadata if context is not None else None
        changed = metadata.mutated_inp_runtime_indices if metadata is not None else []
        if changed and aten.phase != "backward":
            placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
            output = next(node for node in graph.graph.nodes if node.op == "output")
            output.args = ((placeholders[changed[0]], *output.args[0][1:]),)
        return original(self, aten)

    return patch.object(Scheduler, "runner", runner)


def _results_through(change: Callable[[Sequence[Any], list[Any]], list[Any]]) -> AbstractContextManager[Any]:
    """A fault that replaces the results of compiled functions by `change(inputs, results)`."""
    original = backend._compile

    def compile_wrong(*args: Any, **settings: Any) -> Callable[..., Any]:
        function = original(*args, **settings)
        return lambda *inputs: change(inputs, list(function(*inputs)))

    return patch.object(backend, "_compile", compile_wrong)


def _address(value: Any) -> int | None:
    return value.untyped_storage().data_ptr() if isinstance(value, torch.Tensor) and value.numel() else None


@FAULTS.add
def alias_of_an_input_is_a_copy() -> AbstractContextManager[Any]:
    def change(inputs: Sequence[Any], results: list[Any]) -> list[Any]:
        known = {_address(item) for item in inputs} - {None}
        return [result.clone() if _address(result) in known else result for result in results]

    return _results_through(change)


@FAULTS.add
def results_do_not_share_memory() -> AbstractContextManager[Any]:
    def change(inputs: Sequence[Any], results: list[Any]) -> list[Any]:
        seen = {_address(item) for item in inputs}
        changed = []
        for result in results:
            is_alias = _address(result) is not None and _address(result) in seen and _address(result) not in map(_address, inputs)
            changed.append(result.clone(memory_format=torch.preserve_format) if is_alias else result)
            seen.add(_address(result))
        return changed

    return _results_through(change)


@FAULTS.add
def result_is_contiguous() -> AbstractContextManager[Any]:
    """A permuted result has the strides of a contiguous one."""
    original = native._buffer_maker

    def maker(*args: Any) -> Callable[..., torch.Tensor]:
        make = original(*args)
        return lambda *args: make(*args).contiguous()

    return patch.object(native, "_buffer_maker", maker)


@FAULTS.add
def strides_are_those_of_fake_tensors() -> AbstractContextManager[Any]:
    """Results have the strides of fake tensors, even if eager mode's kernels return other strides."""
    return patch.object(lost_writes, "with_eager_strides", lambda op, args, kwargs, result: result)


@FAULTS.add
def view_of_a_result_starts_at_its_beginning() -> AbstractContextManager[Any]:
    original = native._buffer_maker

    def maker(output: Any, *rest: Any) -> Callable[..., torch.Tensor]:
        return original(dataclasses.replace(output, offset=0), *rest)

    return patch.object(native, "_buffer_maker", maker)


@FAULTS.add
def parameter_is_stale() -> AbstractContextManager[Any]:
    """Every later call reads the memory that a parameter had at the first call."""
    original = Arguments.arrays

    def stale_arrays(self: Arguments, tensors: Sequence[torch.Tensor]) -> Sequence[jax.Array]:
        arrays = list(original(self, tensors))
        first_arrays = vars(self).setdefault("_stale", {})
        for index, parameter in enumerate(self.parameters):
            if parameter.static:
                arrays[index] = first_arrays.setdefault(index, (arrays[index], tensors[index].detach()))[0]
        return arrays

    return patch.object(Arguments, "arrays", stale_arrays)


@FAULTS.add
def storage_offset_is_ignored() -> AbstractContextManager[Any]:
    """An input that must be copied is read from the start of its storage."""

    def pack(self: Layout, tensor: torch.Tensor) -> torch.Tensor:
        strides = [tensor.stride(dim) for dim in self.permutation]
        return torch.as_strided(tensor.detach(), self.packed_shape, strides, 0).contiguous()

    return patch.object(Layout, "pack_tensor", pack)


@FAULTS.add
def gaps_are_read() -> AbstractContextManager[Any]:
    """An input with gaps is read as if it had none."""

    def pack(self: Layout, tensor: torch.Tensor) -> torch.Tensor:
        return torch.as_strided(tensor.detach(), self.packed_shape, row_major(self.packed_shape)).clone()

    return patch.object(Layout, "pack_tensor", pack)


@FAULTS.add
def transposed_input_is_read_in_memory_order() -> AbstractContextManager[Any]:
    original = Layout.unpack

    def unpack(self: Layout, array: jax.Array) -> jax.Array:
        return array.reshape(self.shape) if array.size == np.prod(self.shape) else original(self, array)

    return patch.object(Layout, "unpack", unpack)


@FAULTS.add
def expanded_input_is_padded_with_zeros() -> AbstractContextManager[Any]:
    original = Layout.unpack

    def unpack(self: Layout, array: jax.Array) -> jax.Array:
        full = original(self, array)
        for dim, packed_dim in enumerate(np.argsort(self.permutation)):
            if self.packed_shape[packed_dim] != full.shape[dim]:
                first = jnp.arange(full.shape[dim]).reshape([-1 if d == dim else 1 for d in range(full.ndim)]) == 0
                full = jnp.where(first, full, jnp.zeros_like(full))
        return full

    return patch.object(Layout, "unpack", unpack)


@FAULTS.add
def conjugate_bit_is_lost() -> AbstractContextManager[Any]:
    original = Arguments._prepare

    def prepare(self: Arguments, parameter: Any, tensor: torch.Tensor) -> torch.Tensor:
        return original(self, parameter, torch._conj(tensor) if tensor.is_conj() else tensor)

    return patch.object(Arguments, "_prepare", prepare)


@FAULTS.add
def program_of_one_size_serves_all() -> AbstractContextManager[Any]:
    return patch.object(Sizes, "key", lambda self, args: ())


@FAULTS.add
def random_numbers_never_change() -> AbstractContextManager[Any]:
    original = seeds.seed
    first: list[Any] = []

    def seed(*args: Any) -> torch.Tensor:
        first.append(original(*args))
        return first[0]

    return patch.object(seeds, "seed", seed)


@FAULTS.add
def manual_seed_is_ignored() -> AbstractContextManager[Any]:
    original = seeds.seed

    def seed(*args: Any) -> torch.Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.seed()
            return original(*args)

    return patch.object(seeds, "seed", seed)


# Writes


@lowered(aten.slice_scatter.default)
def write_to_a_slice_is_lost(original: Lowering, x: Any, *rest: Any, **options: Any) -> Any:
    return x


@lowered(aten.select_scatter.default)
def write_to_the_last_goes_to_the_first(original: Lowering, x: Any, source: Any, dim: int, index: int) -> Any:
    return original(x, source, dim, max(index, 0))


@lowered(aten.as_strided_scatter.default)
def write_through_strides_is_lost(original: Lowering, x: Any, *rest: Any, **options: Any) -> Any:
    return x


@lowered(aten.index_put.default)
def index_put_does_not_accumulate(original: Lowering, x: Any, indices: Any, values: Any, accumulate: bool = False, **options: Any) -> Any:
    return original(x, indices, values, False, **options)


@lowered(aten.scatter_add.default)
def scatter_add_does_not_add(original: Lowering, x: Any, dim: int, index: Any, source: Any, **options: Any) -> Any:
    return original(jnp.zeros_like(x), dim, index, source, **options)


@lowered(aten.copy.default)
def copy_rounds_instead_of_truncating(original: Lowering, x: Any, source: Any, *rest: Any) -> Any:
    narrowing = dtypes.is_float(source.dtype) and dtypes.is_integer(x.dtype)
    return original(x, jnp.round(source) if narrowing else source, *rest)


# Promotion


def _computed_in(choose: Callable[[Sequence[Any], Any], Any]) -> AbstractContextManager[Any]:
    """A fault: elementwise ops compute in the dtype `choose(operands, dtype)`, where `dtype` is the correct one."""
    original = promotion.computation_and_result_dtype

    def wrong(operands: Sequence[Any], kind: Any) -> tuple[Any, Any]:
        computation, result = original(operands, kind)
        return choose(operands, computation), result

    return patch.object(promotion, "computation_and_result_dtype", wrong)


@FAULTS.add
def number_is_cast_to_the_tensors_dtype() -> AbstractContextManager[Any]:
    """integers * 2.5 is computed as integers * 2."""

    def choose(operands: Sequence[Any], dtype: Any) -> Any:
        arrays = [operand for operand in operands if isinstance(operand, jax.Array)]
        alone = len(arrays) == 1 and len(operands) == 2 and dtypes.is_integer(arrays[0].dtype)
        return arrays[0].dtype if alone and any(isinstance(operand, float) for operand in operands) else dtype

    return _computed_in(choose)


@FAULTS.add
def rank_zero_operand_is_cast_to_the_other_dtype() -> AbstractContextManager[Any]:
    def choose(operands: Sequence[Any], dtype: Any) -> Any:
        arrays = [operand for operand in operands if isinstance(operand, jax.Array)]
        mixed = len(arrays) == 2 and {array.ndim > 0 for array in arrays} == {True, False}
        other = next((array for array in arrays if array.ndim), None)
        return other.dtype if mixed and other is not None and dtypes.is_integer(other.dtype) else dtype

    return _computed_in(choose)


@FAULTS.add
def python_float_is_float64() -> AbstractContextManager[Any]:
    """A Python number promotes as a tensor of its dtype would."""

    def strong(higher: torch.dtype | None, lower: torch.dtype | None) -> torch.dtype | None:
        return higher or lower if higher is None or lower is None else torch.promote_types(higher, lower)

    return patch.object(promotion, "_combine", strong)


@FAULTS.add
def float_and_integer_are_computed_as_integers() -> AbstractContextManager[Any]:
    def choose(operands: Sequence[Any], dtype: Any) -> Any:
        array_dtypes = [operand.dtype for operand in operands if isinstance(operand, jax.Array)]
        integers = [array_dtype for array_dtype in array_dtypes if dtypes.is_integer(array_dtype)]
        return integers[0] if len(array_dtypes) == 2 and len(integers) == 1 and any(map(dtypes.is_float, array_dtypes)) else dtype

    return _computed_in(choose)


# Arithmetic


@FAULTS.add
def integer_division_truncates() -> AbstractContextManager[Any]:
    original = division._floor_divide

    def divide(x: Any, y: Any, *rest: Any) -> Any:
        return jax.lax.div(x, y) if dtypes.is_integer(x.dtype) else original(x, y, *rest)

    return patch.object(division, "_floor_divide", divide)


@lowered(aten.remainder.Tensor, aten.remainder.Scalar)
def remainder_has_the_dividends_sign(original: Lowering, x: Any, y: Any, **options: Any) -> Any:
    return promotion.elementwise(jax.lax.rem, (x, y), promotion.Promotion.DEFAULT)


@lowered(aten.round.default)
def round_goes_away_from_zero(original: Lowering, x: Any) -> Any:
    return jax.lax.round(x, jax.lax.RoundingMethod.AWAY_FROM_ZERO) if dtypes.is_float(x.dtype) else x


@lowered(aten.bitwise_right_shift.Tensor_Scalar, aten.__rshift__.Scalar)
def right_shift_drops_the_sign(original: Lowering, x: Any, bits: Any) -> Any:
    return promotion.elementwise(jax.lax.shift_right_logical, (x, bits), promotion.Promotion.DEFAULT)


@lowered(aten.view.dtype)
def bits_are_converted_as_numbers(original: Lowering, x: Any, dtype: Any) -> Any:
    out = original(x, dtype)
    return promotion.convert(x, dtype) if out.shape == x.shape else out


# Reductions


@lowered(aten.amax.default, aten.max.default)
def maximum_ignores_nan(original: Lowering, x: Any, *rest: Any) -> Any:
    return original(jnp.where(jnp.isnan(x), -jnp.inf, x).astype(x.dtype) if dtypes.is_float(x.dtype) else x, *rest)


@lowered(aten.cumsum.default)
def running_sum_of_integers_is_narrow(original: Lowering, x: Any, dim: int, **options: Any) -> Any:
    out = original(x, dim, **options)
    return out if dtypes.is_inexact(x.dtype) or dtypes.is_bool(x.dtype) else out.astype(np.int8).astype(out.dtype)


@lowered(aten.sum.default, aten.sum.dim_IntList)
def sum_of_bools_is_any(original: Lowering, x: Any, *rest: Any, **options: Any) -> Any:
    out = original(x, *rest, **options)
    return jnp.minimum(out, jnp.ones_like(out)) if dtypes.is_bool(x.dtype) else out


@lowered(aten.argmax.default)
def argmax_gives_the_last_of_equals(original: Lowering, x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    if not x.ndim:
        return original(x, dim, keepdim)
    count = x.size if dim is None else x.shape[dim]
    return count - 1 - original(jnp.flip(x, dim), dim, keepdim)


@lowered(aten.var.correction)
def variance_is_not_corrected(original: Lowering, x: Any, *rest: Any, **options: Any) -> Any:
    return original(x, *rest, **(options | {"correction": 0}))


@lowered(aten.sort.stable)
def descending_sort_reverses_equals(original: Lowering, x: Any, **options: Any) -> Any:
    if not options.get("descending") or not x.ndim:
        return original(x, **options)
    return tuple(jnp.flip(part, options["dim"]) for part in original(x, **(options | {"descending": False})))


# Views and indices


@lowered(aten.slice.Tensor)
def step_of_a_slice_is_ignored(original: Lowering, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    count = original(x, dim, start, end, step).shape[dim]
    return jax.lax.slice_in_dim(original(x, dim, start, end, 1), 0, count, axis=dim % x.ndim)


@lowered(aten.index.Tensor)
def negative_indices_are_zero(original: Lowering, x: Any, indices: Any, **options: Any) -> Any:
    def clamped(index: Any) -> Any:
        return index if index is None or dtypes.is_bool(index.dtype) else jnp.maximum(index, 0)

    return original(x, [clamped(index) for index in indices], **options)


@lowered(aten.diagonal.default)
def diagonal_is_on_the_other_side(original: Lowering, x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    other = original(x, -offset, dim1, dim2)
    out = original(x, offset, dim1, dim2)
    return other if other.shape == out.shape else out


# Gradients


@lowered(aten.threshold_backward.default)
def gradient_at_the_threshold_passes(original: Lowering, grad: Any, x: Any, threshold: Any) -> Any:
    return original(grad, jnp.where(x == threshold, x + 1, x), threshold)


@lowered(aten.slice_backward.default)
def gradient_of_a_slice_goes_to_the_front(
    original: Lowering, grad: Any, sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Any:
    return original(grad, sizes, dim, 0, grad.shape[dim] * step, step)
