"""A JAX primitive whose body keeps 64-bit numbers even under 32-bit JAX, and which takes custom derivatives.

Under 32-bit JAX (`jax_enable_x64` is off) a program cannot hold 64-bit numbers: JAX narrows them when it lowers a traced function. torch's
programs use many 64-bit numbers, such as indices. So a torch function is one JAX primitive in a JAX program: the body of the primitive is
traced, differentiated, batched and lowered with 64 bits, and its operands and results have the dtypes of the user's JAX.

The primitive takes custom derivatives, since the derivative of a torch function comes from torch's autograd, not from JAX's rules.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from ..artifact.manifest import NARROW_DTYPES
from ..artifact.xla_options import jit_with_cpu_options
from ..lowering import dtypes
from ..runtime import private
from ..runtime.cache import LeastRecentlyUsed

Run = Callable[..., Sequence[Array]]

# The largest number of cached traces, batched and differentiated variants of one call.
_CACHE_SIZE = 32

_call = Primitive("dynaxla_call")
_call.multiple_results = True


class WideCall:
    """A function of arrays that JAX's programs can call as one primitive.

    The function may be linear in its last operands, called the linear operands. The operands before them are the fixed operands.

    Args:
        run: Takes the fixed operands, then the linear operands, if any, and returns arrays.
        transposed: The transpose of a linear function: takes the fixed operands and the cotangents of the results, and returns the
            cotangents of the linear operands. None for other functions.
        differentiable: Returns a call with the same operands and results, whose `run` JAX can differentiate. None if JAX can differentiate
            `run` itself.
    """

    def __init__(self, run: Run, transposed: Run | None = None, differentiable: Callable[[], WideCall] | None = None) -> None:
        self.run = run
        self.differentiable = differentiable
        self._transposed = transposed
        self._transpose: WideCall | None = None
        self._cache: LeastRecentlyUsed[Any] = LeastRecentlyUsed(_CACHE_SIZE)

    def __call__(self, fixed: Sequence[Any], linear: Sequence[Any] = ()) -> list[Array]:
        """Calls the function with arrays or tracers.

        Args:
            fixed: The fixed operands.
            linear: The linear operands.
        """
        operands = varying([*fixed, *linear], axes_of([*fixed, *linear]))
        results: list[Array] = _call.bind(*operands, call=self, num_fixed=len(fixed), jaxpr=self._traced(operands))
        return results

    @property
    def transpose(self) -> WideCall:
        """The transposed call. Its transpose is this call."""
        assert self._transposed is not None
        if self._transpose is None:
            self._transpose = WideCall(self._transposed, self.run, self._differentiable_then(lambda call: call.transpose))
            self._transpose._transpose = self
        return self._transpose

    def derivative(self, wanted: tuple[bool, ...]) -> Derivative:
        """Returns the derivative with respect to some operands.

        Args:
            wanted: For each operand, True if the derivative with respect to it is wanted.
        """

        def derive() -> Derivative:
            return _jax_derivative(self.run if self.differentiable is None else self.differentiable().run, wanted)

        return self._cached(("derivative", wanted), derive)

    def batched(self, is_batched: tuple[bool, ...], num_linear: int) -> WideCall:
        """Returns the function mapped by `jax.vmap` over dimension 0 of operands and results.

        Args:
            is_batched: For each fixed operand, True if it has the mapped dimension.
            num_linear: The number of linear operands, which all have the mapped dimension.
        """
        return self._cached(("batched", is_batched, num_linear), lambda: self._batch(is_batched, num_linear))

    def _batch(self, is_batched: tuple[bool, ...], num_linear: int) -> WideCall:
        fixed_axes = tuple(0 if flag else None for flag in is_batched)
        transposed = None
        if self._transposed is not None:
            inner = self._transposed

            def transposed(*operands: Array) -> Sequence[Array]:
                num_cotangents = len(operands) - len(fixed_axes)
                return list(jax.vmap(inner, in_axes=(*fixed_axes, *[0] * num_cotangents))(*operands))

        run = jax.vmap(self.run, in_axes=(*fixed_axes, *[0] * num_linear))
        return _BatchedCall(self, is_batched, run, transposed, self._differentiable_then(lambda call: call.batched(is_batched, num_linear)))

    def _differentiable_then(self, change: Callable[[WideCall], WideCall]) -> Callable[[], WideCall] | None:
        """Returns `differentiable` for the call that results from a change of this call."""
        differentiable = self.differentiable
        return None if differentiable is None else lambda: change(differentiable())

    def _traced(self, operands: Sequence[Any]) -> ClosedJaxpr:
        """Returns the function's jaxpr for operands with these shapes and dtypes, traced with 64-bit types enabled."""

        def run(*operands: Array) -> Sequence[Array]:
            return varying(self.run(*operands), axes_of(operands))

        def trace() -> ClosedJaxpr:
            with jax.enable_x64(True):
                return jax.make_jaxpr(run)(*operands)

        return self._cached((jax.sharding.get_abstract_mesh(), *map(jax.typeof, operands)), trace)

    def _cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if (value := self._cache.get(key)) is None:
            value = make()
            self._cache.put(key, value)
        return value


def axes_of(arrays: Sequence[Any]) -> frozenset[str]:
    """Returns the mesh axes along which any of these arrays varies, inside `jax.shard_map`."""
    return frozenset().union(*[private.varying_axes(jax.typeof(array)) for array in arrays])


def varying(arrays: Sequence[Any], axes: frozenset[str]) -> list[Any]:
    """Marks arrays as varying along mesh axes, inside `jax.shard_map`. JAX requires that all operands of an op vary along the same axes.

    The transpose of this operation sums the cotangent of each newly marked array over the devices along the axes.
    """
    missing = [tuple(sorted(axes - axes_of([array]))) for array in arrays]
    return [lax.pcast(array, names, to="varying") if names else array for array, names in zip(arrays, missing, strict=True)]


class Derivative:
    """The derivative of a call.

    Attributes:
        forward: Takes the call's operands, and returns the call's results followed by the residuals.
        linear: Takes the residuals and the tangents of the wanted operands, and returns the tangents of the differentiable results.
        differentiable_results: The indices of the results that have tangents; known once `forward` has been called.
    """

    def __init__(self, forward: WideCall, linear: WideCall, differentiable_results: Sequence[int]) -> None:
        self.forward, self.linear, self.differentiable_results = forward, linear, differentiable_results


class _BatchedCall(WideCall):
    """A batched call. Its derivative is the batched derivative of the original call."""

    def __init__(
        self, call: WideCall, is_batched: tuple[bool, ...], run: Run, transposed: Run | None, differentiable: Callable[[], WideCall] | None
    ) -> None:
        super().__init__(run, transposed, differentiable)
        self._call, self._is_batched = call, is_batched

    def derivative(self, wanted: tuple[bool, ...]) -> Derivative:
        if self._transposed is not None:
            return super().derivative(wanted)
        return self._cached(("derivative", wanted), lambda: self._batched_derivative(wanted))

    def _batched_derivative(self, wanted: tuple[bool, ...]) -> Derivative:
        """Returns the derivative of the original call, mapped over the batch."""
        inner = self._call.derivative(wanted)
        forward = inner.forward.batched(self._is_batched, 0)

        # The tangent of an operand that is not batched is not batched either, and its cotangent is the sum over the batch.
        has_batch = [flag for flag, want in zip(self._is_batched, wanted, strict=True) if want]
        return Derivative(forward, _batched_linear(inner.linear, has_batch), inner.differentiable_results)


def _batched_linear(linear: WideCall, has_batch: Sequence[bool]) -> WideCall:
    """Returns the linear call of a derivative, mapped over residuals and tangents.

    Args:
        linear: See `Derivative.linear`.
        has_batch: For each linear operand, True if it has the mapped dimension.
    """
    tangent_axes = tuple(0 if flag else None for flag in has_batch)

    def push_forward(*operands: Array) -> Sequence[Array]:
        num_residuals = len(operands) - len(tangent_axes)
        return list(jax.vmap(linear.run, in_axes=(*[0] * num_residuals, *tangent_axes))(*operands))

    def pull_back(*operands: Array) -> Sequence[Array]:
        cotangents = jax.vmap(linear.transpose.run)(*operands)
        return [item if flag else lax.reduce_sum(item, (0,)) for item, flag in zip(cotangents, has_batch, strict=True)]

    return WideCall(push_forward, pull_back, linear._differentiable_then(lambda call: _batched_linear(call, has_batch)))


def _jax_derivative(run: Run, wanted: tuple[bool, ...]) -> Derivative:
    """Returns the derivative of a function by JAX's own rules. The residuals are the operands."""
    positions = [position for position, want in enumerate(wanted) if want]
    differentiable_results: list[int] = []

    def forward(*operands: Array) -> Sequence[Array]:
        results = list(run(*operands))
        differentiable_results[:] = [index for index, result in enumerate(results) if dtypes.is_inexact(result.dtype)]
        return [*results, *operands]

    def inexact_results_at(operands: Sequence[Array]) -> Callable[..., list[Array]]:
        def function(*values: Array) -> list[Array]:
            all_operands = list(operands)
            for position, value in zip(positions, values, strict=True):
                all_operands[position] = value
            return [result for result in run(*all_operands) if dtypes.is_inexact(result.dtype)]

        return function

    def push_forward(*operands: Array) -> Sequence[Array]:
        residuals, tangents = operands[: len(wanted)], operands[len(wanted) :]
        primals = [residuals[position] for position in positions]
        output_tangents: list[Array] = jax.jvp(inexact_results_at(residuals), primals, list(tangents))[1]
        return output_tangents

    def pull_back(*operands: Array) -> Sequence[Array]:
        residuals, cotangents = operands[: len(wanted)], operands[len(wanted) :]
        return list(jax.vjp(inexact_results_at(residuals), *[residuals[position] for position in positions])[1](list(cotangents)))

    return Derivative(WideCall(forward), WideCall(push_forward, pull_back), differentiable_results)


# The rules of the primitive for JAX's transformations, with the signatures that JAX requires.


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: WideCall, num_fixed: int, jaxpr: ClosedJaxpr) -> tuple[Any, Any]:
    wanted = tuple(type(tangent) is not ad.Zero for tangent in tangents)
    if num_fixed < len(primals) and not any(wanted[:num_fixed]):  # linear in all operands that have tangents
        results = _call.bind(*primals, call=call, num_fixed=num_fixed, jaxpr=jaxpr)
        return results, call(primals[:num_fixed], [ad.instantiate_zeros(tangent) for tangent in tangents[num_fixed:]])
    derivative = call.derivative(wanted)
    outputs = derivative.forward(primals)
    count = len(jaxpr.out_avals)
    results, residuals = outputs[:count], outputs[count:]
    tangents_out = [ad.Zero(aval.to_tangent_aval()) for aval in jaxpr.out_avals]
    output_tangents = derivative.linear(residuals, [tangent for tangent, want in zip(tangents, wanted, strict=True) if want])
    for index, tangent in zip(derivative.differentiable_results, output_tangents, strict=True):
        tangents_out[index] = tangent
    return results, tangents_out


def _transpose(cotangents: Sequence[Any], *operands: Any, call: WideCall, num_fixed: int, jaxpr: ClosedJaxpr) -> list[Any]:
    result_cotangents = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    operand_cotangents = call.transpose(operands[:num_fixed], result_cotangents)
    undefined = map(ad.is_undefined_primal, operands[num_fixed:])
    return [None] * num_fixed + [item if is_undefined else None for item, is_undefined in zip(operand_cotangents, undefined, strict=True)]


def _batch(operands: Sequence[Any], dims: Sequence[int | None], *, call: WideCall, num_fixed: int, jaxpr: ClosedJaxpr) -> tuple[Any, Any]:
    size = next(operand.shape[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None)
    batched_operands = []
    for index, (operand, dim) in enumerate(zip(operands, dims, strict=True)):
        if dim is not None:
            batched_operands.append(jax.numpy.moveaxis(operand, dim, 0))
        else:
            batched_operands.append(operand if index < num_fixed else lax.broadcast(operand, (size,)))
    is_batched = tuple(dim is not None for dim in dims[:num_fixed])
    results = call.batched(is_batched, len(operands) - num_fixed)(batched_operands[:num_fixed], batched_operands[num_fixed:])
    return results, [0] * len(results)


def _lower(ctx: Any, *operands: Any, call: WideCall, num_fixed: int, jaxpr: ClosedJaxpr) -> Any:
    with jax.enable_x64(True):
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *operands)


@functools.lru_cache(maxsize=256)
def _compiled(jaxpr: ClosedJaxpr) -> Callable[..., list[Array]]:
    return jit_with_cpu_options(jaxpr_as_fun(jaxpr))


def _run(*operands: Any, call: WideCall, num_fixed: int, jaxpr: ClosedJaxpr) -> list[Array]:
    with jax.enable_x64(True):
        return _compiled(jaxpr)(*operands)


_call.def_impl(_run)
_call.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
ad.primitive_jvps[_call] = _jvp
ad.primitive_transposes[_call] = _transpose
batching.primitive_batchers[_call] = _batch
mlir.register_lowering(_call, _lower)


def narrowed(dtype: dtypes.DType) -> dtypes.DType:
    """Returns the dtype to which 32-bit JAX converts a dtype, such as int32 for int64; other dtypes stay as they are."""
    narrow = NARROW_DTYPES.get(np.dtype(dtype).name)
    return np.dtype(dtype if narrow is None else narrow)
