"""Calls within JAX's programs that keep 64-bit numbers 64 bits wide, and that have custom derivatives.

Under 32-bit JAX (`jax_enable_x64` is off) a program cannot hold 64-bit numbers: JAX narrows them when it lowers a traced function. torch's
programs are full of them, such as indices. So a torch function is one operation (a JAX primitive) in a JAX program: its body is traced,
differentiated, batched and lowered with 64 bits, and its operands and results have the dtypes of the user's JAX.

The primitive also takes custom derivatives: the derivative of a torch function is autograd's, not the one that JAX would derive from its
operations.
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

from ..lowering import dtypes
from ..runtime import private
from ..runtime.cache import LeastRecentlyUsed

Run = Callable[..., Sequence[Array]]

# The number of cached traces, batched and differentiated variants of one call.
_KEPT = 32

_call = Primitive("dynaxla_call")
_call.multiple_results = True


class Call:
    """A function of arrays that JAX's programs can call.

    Args:
        run: Takes the operands that it holds fixed, then those in which it is linear, if any, and returns arrays.
        transposed: If the function is linear, its transpose: takes the fixed operands and cotangents of the results.
        refusal: The exception to raise when its derivative is taken; None if it is differentiable.
    """

    def __init__(self, run: Run, transposed: Run | None = None, refusal: Exception | None = None) -> None:
        self.run = run
        self.refusal = refusal
        self._transposed = transposed
        self._transpose: Call | None = None
        self._kept: LeastRecentlyUsed[Any] = LeastRecentlyUsed(_KEPT)

    def __call__(self, held: Sequence[Any], linear: Sequence[Any] = ()) -> list[Array]:
        """Calls the function with arrays or tracers. `held`: the fixed operands; `linear`: those in which `run` is linear."""
        operands = varying([*held, *linear], axes_of([*held, *linear]))
        found: list[Array] = _call.bind(*operands, call=self, held=len(held), jaxpr=self._traced(operands))
        return found

    @property
    def transpose(self) -> Call:
        """The transposed call, whose transpose is this one."""
        assert self._transposed is not None
        if self._transpose is None:
            self._transpose = Call(self._transposed, self.run, self.refusal)
            self._transpose._transpose = self
        return self._transpose

    def derivative(self, wanted: tuple[bool, ...]) -> Derivative:
        """Returns the derivative with respect to the wanted operands.

        Raises:
            Exception: The refusal, if there is one.
        """
        if self.refusal is not None:
            raise self.refusal
        return self._once(("derivative", wanted), lambda: _by_jax(self.run, wanted))

    def batched(self, flags: tuple[bool, ...], count: int) -> Call:
        """Returns the same function of batches, along dimension 0.

        Args:
            flags: For each fixed operand, True if it is a batch.
            count: The number of linear operands, all of which are batches.
        """
        return self._once(("batched", flags, count), lambda: self._batch(flags, count))

    def _batch(self, flags: tuple[bool, ...], count: int) -> Call:
        held = tuple(0 if flag else None for flag in flags)
        transposed = None
        if self._transposed is not None:
            inner = self._transposed

            def transposed(*operands: Array) -> Sequence[Array]:
                cotangents = len(operands) - len(held)
                return list(jax.vmap(inner, in_axes=(*held, *[0] * cotangents))(*operands))

        return _Batched(self, flags, jax.vmap(self.run, in_axes=(*held, *[0] * count)), transposed)

    def _traced(self, operands: Sequence[Any]) -> ClosedJaxpr:
        def run(*operands: Array) -> Sequence[Array]:
            return varying(self.run(*operands), axes_of(operands))

        def trace() -> ClosedJaxpr:
            with jax.enable_x64(True):
                return jax.make_jaxpr(run)(*operands)

        return self._once((jax.sharding.get_abstract_mesh(), *map(jax.typeof, operands)), trace)

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if (known := self._kept.get(key)) is None:
            known = make()
            self._kept.put(key, known)
        return known


def axes_of(arrays: Sequence[Any]) -> frozenset[str]:
    """Returns the mesh axes along which any of these arrays varies, inside `jax.shard_map`."""
    return frozenset().union(*[private.varying_axes(jax.typeof(array)) for array in arrays])


def varying(arrays: Sequence[Any], axes: frozenset[str]) -> list[Any]:
    """Returns the arrays marked as varying along these mesh axes, as JAX requires where they are combined with arrays that vary along them.

    The cotangent of an array that is the same everywhere is then summed along the axes.
    """
    missing = [tuple(sorted(axes - axes_of([array]))) for array in arrays]
    return [lax.pcast(array, names, to="varying") if names else array for array, names in zip(arrays, missing, strict=True)]


class Derivative:
    """The derivative of a call.

    Attributes:
        forward: Takes the call's operands, and returns its results followed by the residuals for `linear`.
        linear: Takes the residuals and the tangents of the wanted operands, and returns the tangents of the results `moving`.
        moving: The indices of the results that have tangents; known once `forward` has been called.
    """

    def __init__(self, forward: Call, linear: Call, moving: Sequence[int]) -> None:
        self.forward, self.linear, self.moving = forward, linear, moving


class _Batched(Call):
    """A batched call, whose derivative is the batched derivative of the original call."""

    def __init__(self, call: Call, flags: tuple[bool, ...], run: Run, transposed: Run | None) -> None:
        super().__init__(run, transposed, call.refusal)
        self._call, self._flags = call, flags

    def derivative(self, wanted: tuple[bool, ...]) -> Derivative:
        if self._transposed is not None:
            return super().derivative(wanted)
        return self._once(("derivative", wanted), lambda: self._batched_derivative(wanted))

    def _batched_derivative(self, wanted: tuple[bool, ...]) -> Derivative:
        inner = self._call.derivative(wanted)
        forward = inner.forward.batched(self._flags, 0)
        plain = inner.linear

        # The tangent of an operand that is not batched is not batched either, and its cotangent is the sum over the batch.
        flags = [flag for flag, want in zip(self._flags, wanted, strict=True) if want]
        moving = tuple(0 if flag else None for flag in flags)

        def pushed(*operands: Array) -> Sequence[Array]:
            held = len(operands) - len(moving)
            return list(jax.vmap(plain.run, in_axes=(*[0] * held, *moving))(*operands))

        def pulled(*operands: Array) -> Sequence[Array]:
            found = jax.vmap(plain.transpose.run)(*operands)
            return [item if flag else lax.reduce_sum(item, (0,)) for item, flag in zip(found, flags, strict=True)]

        return Derivative(forward, Call(pushed, pulled, plain.refusal), inner.moving)


def _by_jax(run: Run, wanted: tuple[bool, ...]) -> Derivative:
    """Returns the derivative that JAX derives from the function's operations."""
    positions = [position for position, want in enumerate(wanted) if want]
    moving: list[int] = []

    def forward(*operands: Array) -> Sequence[Array]:
        results = list(run(*operands))
        moving[:] = [index for index, result in enumerate(results) if dtypes.is_inexact(result.dtype)]
        return [*results, *operands]

    def along(operands: Sequence[Array]) -> Callable[..., list[Array]]:
        def function(*values: Array) -> list[Array]:
            given = list(operands)
            for position, value in zip(positions, values, strict=True):
                given[position] = value
            return [result for result in run(*given) if dtypes.is_inexact(result.dtype)]

        return function

    def pushed(*operands: Array) -> Sequence[Array]:
        held, tangents = operands[: len(wanted)], operands[len(wanted) :]
        found: list[Array] = jax.jvp(along(held), [held[position] for position in positions], list(tangents))[1]
        return found

    def pulled(*operands: Array) -> Sequence[Array]:
        held, cotangents = operands[: len(wanted)], operands[len(wanted) :]
        return list(jax.vjp(along(held), *[held[position] for position in positions])[1](list(cotangents)))

    return Derivative(Call(forward), Call(pushed, pulled), moving)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call, held: int, jaxpr: ClosedJaxpr) -> tuple[Any, Any]:
    wanted = tuple(type(tangent) is not ad.Zero for tangent in tangents)
    if held < len(primals) and not any(wanted[:held]):  # linear in all operands that have tangents
        results = _call.bind(*primals, call=call, held=held, jaxpr=jaxpr)
        return results, call(primals[:held], [ad.instantiate_zeros(tangent) for tangent in tangents[held:]])
    derivative = call.derivative(wanted)
    found = derivative.forward(primals)
    count = len(jaxpr.out_avals)
    results, kept = found[:count], found[count:]
    out = [ad.Zero(aval.to_tangent_aval()) for aval in jaxpr.out_avals]
    moved = derivative.linear(kept, [tangent for tangent, want in zip(tangents, wanted, strict=True) if want])
    for index, tangent in zip(derivative.moving, moved, strict=True):
        out[index] = tangent
    return results, out


def _transpose(cotangents: Sequence[Any], *operands: Any, call: Call, held: int, jaxpr: ClosedJaxpr) -> list[Any]:
    given = [ad.instantiate_zeros(cotangent) for cotangent in cotangents]
    found = call.transpose(operands[:held], given)
    unknown = map(ad.is_undefined_primal, operands[held:])
    return [None] * held + [item if is_unknown else None for item, is_unknown in zip(found, unknown, strict=True)]


def _batch(operands: Sequence[Any], dims: Sequence[int | None], *, call: Call, held: int, jaxpr: ClosedJaxpr) -> tuple[Any, Any]:
    size = next(operand.shape[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None)
    given = []
    for index, (operand, dim) in enumerate(zip(operands, dims, strict=True)):
        if dim is not None:
            given.append(jax.numpy.moveaxis(operand, dim, 0))
        else:
            given.append(operand if index < held else lax.broadcast(operand, (size,)))
    flags = tuple(dim is not None for dim in dims[:held])
    found = call.batched(flags, len(operands) - held)(given[:held], given[held:])
    return found, [0] * len(found)


def _lower(ctx: Any, *operands: Any, call: Call, held: int, jaxpr: ClosedJaxpr) -> Any:
    with jax.enable_x64(True):
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *operands)


@functools.lru_cache(maxsize=256)
def _compiled(jaxpr: ClosedJaxpr) -> Callable[..., list[Array]]:
    return jax.jit(jaxpr_as_fun(jaxpr))


def _run(*operands: Any, call: Call, held: int, jaxpr: ClosedJaxpr) -> list[Array]:
    with jax.enable_x64(True):
        return _compiled(jaxpr)(*operands)


_call.def_impl(_run)
_call.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
ad.primitive_jvps[_call] = _jvp
ad.primitive_transposes[_call] = _transpose
batching.primitive_batchers[_call] = _batch
mlir.register_lowering(_call, _lower)

# The dtypes to which 32-bit JAX narrows torch's 64-bit numbers.
_NARROW = {
    np.dtype(wide): np.dtype(narrow)
    for wide, narrow in {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}.items()
}


def narrowed(dtype: dtypes.DType) -> dtypes.DType:
    """Returns the dtype that replaces a dtype in 32-bit JAX."""
    return _NARROW.get(np.dtype(dtype), np.dtype(dtype))
