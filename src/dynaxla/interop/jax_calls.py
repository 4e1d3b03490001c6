"""Calls of JAX functions as a torch op: `dynaxla::jax_call(operands, call)`, where `call` is the number of a `JaxCall`.

The op is pure. In dynaxla's graphs it is lowered to the function itself, which becomes part of the program; other backends call it like any
custom op. The function is traced once for given shapes and dtypes, so the forward and the backward pass of a graph use the same trace, even
if the function has changed in between.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..errors import DynaxlaError
from ..lowering import dtypes, lowers
from ..lowering.registry import registry
from ..runtime import capture_lock, private
from .array_conversion import ArrayScope, torch_dtype

_numbers = itertools.count(1)
_calls: weakref.WeakValueDictionary[int, JaxCall] = weakref.WeakValueDictionary()
# Calls in graphs of other backends. Such graphs hold no reference to their calls, so this keeps the calls alive.
_named_elsewhere: dict[int, JaxCall] = {}

# Shape and dtype (JAX's) of each operand.
Avals = tuple[tuple[tuple[int, ...], np.dtype], ...]


class JaxCall:
    """A JAX function from arrays to a list of arrays, with a number that identifies it.

    Args:
        function: Takes an array for each operand.
        name: The function's name, for errors.
        x64: It runs with JAX's 64-bit types enabled.
    """

    def __init__(self, function: Callable[..., Sequence[Any]], name: str, x64: bool) -> None:
        self.function, self.name, self.x64 = function, name, x64
        self.number = next(_numbers)
        self._traces: dict[Avals, Any] = {}
        self._derived: dict[Any, JaxCall] = {}
        _calls[self.number] = self

    def traced(self, avals: Avals) -> Any:
        """Returns the function's jaxpr for such operands, traced at the first request."""
        if avals not in self._traces:
            with jax.enable_x64(self.x64):
                operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in avals]
                self._traces[avals] = jax.make_jaxpr(self.function)(*operands)
        return self._traces[avals]

    def by_trace(self, *operands: jax.Array) -> list[jax.Array]:
        """Returns the function's results, computed by its trace. Works under jax tracing, too."""
        with jax.enable_x64(self.x64):
            return list(jax.extend.core.jaxpr_as_fun(self.traced(avals_of(operands)))(*operands))

    def of_trace(self) -> JaxCall:
        """Returns the call whose function is this call's trace."""
        return self._derive("trace", lambda: self.by_trace)

    @functools.cached_property
    def compiled(self) -> Callable[..., list[jax.Array]]:
        """The function, compiled by XLA. Only for functions that are traces and so never change."""
        return jax.jit(self.function)

    def backward(self, wanted: tuple[int, ...], count: int) -> JaxCall:
        """Returns the call of the backward pass.

        It takes the `count` operands and the cotangents of the inexact results, and returns the cotangents of the operands at the positions
        `wanted`.
        """

        def pull_back(*arrays: jax.Array) -> list[jax.Array]:
            _, pull = vjp(self.function, arrays[:count], wanted)
            return pull(arrays[count:])

        return self._derive(("backward", wanted), lambda: pull_back)

    def batched(self, dims: tuple[int | None, ...]) -> JaxCall:
        """Returns the call mapped over one dimension of each operand (None: not mapped). The results' dimension 0 is the mapped one."""
        return self._derive(("batched", dims), lambda: jax.vmap(self.function, in_axes=dims))

    def _derive(self, key: Any, make: Callable[[], Callable[..., Sequence[Any]]]) -> JaxCall:
        if key not in self._derived:
            self._derived[key] = JaxCall(make(), self.name, self.x64)
        return self._derived[key]


def vjp(
    function: Callable[..., Sequence[Any]], operands: Sequence[jax.Array], wanted: Sequence[int]
) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], list[jax.Array]]]:
    """Returns the function's results and its pullback.

    The pullback takes a cotangent for each inexact result, and returns the cotangents of the operands `wanted`. Cotangents are conjugated,
    like torch's gradients of complex numbers.
    """

    def of_wanted(*values: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        every = list(operands)
        for position, value in zip(wanted, values, strict=True):
            every[position] = value
        results = [jnp.asarray(result) for result in function(*every)]
        return [result for result in results if dtypes.is_inexact(result.dtype)], results

    _, pull, results = jax.vjp(of_wanted, *(operands[position] for position in wanted), has_aux=True)

    def pull_back(cotangents: Sequence[jax.Array]) -> list[jax.Array]:
        return [_conjugate(value) for value in pull([_conjugate(value) for value in cotangents])]

    return results, pull_back


def _conjugate(value: jax.Array) -> jax.Array:
    return lax.conj(value) if dtypes.is_complex(value.dtype) else value


def avals_of(operands: Sequence[Any]) -> Avals:
    """Returns the shapes and dtypes of arrays or torch tensors. Symbolic sizes become numbers, since JAX functions are traced for fixed
    sizes.
    """
    return tuple([(tuple(int(size) for size in operand.shape), _dtype(operand)) for operand in operands])


def _dtype(operand: Any) -> np.dtype:
    return dtypes.to_jax(operand.dtype) if isinstance(operand, torch.Tensor) else np.dtype(operand.dtype)


def find(number: int) -> JaxCall:
    """Returns the call with this number.

    Raises:
        DynaxlaError: The call no longer exists.
    """
    found = _calls.get(number)
    if found is None:
        raise DynaxlaError(
            f"the JAX function of call {number} no longer exists: its process or its torch function has ended",
            hint="call the function that dynaxla.to_torch returned, instead of an op of an older graph",
        )
    return found


def run(call: JaxCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Calls the function now."""
    with ArrayScope(tensors, call.name, call.x64) as border:
        return border.take(list(call.function(*border.arrays)))


_library = torch.library.Library("dynaxla", "FRAGMENT")
private.register_own_libraries(_library)
_library.define("jax_call(Tensor[] operands, int call) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
jax_call = torch.ops.dynaxla.jax_call.default


def _run(operands: Sequence[torch.Tensor], call: int) -> list[torch.Tensor]:
    found = find(call)
    with ArrayScope(operands, found.name, found.x64) as border:
        return border.take(list(found.compiled(*border.arrays)))


_library.impl("jax_call", private.skipped_by_dynamo(_run), "CompositeExplicitAutograd")


@torch.library.register_fake("dynaxla::jax_call", lib=_library)
def _fake(operands: Sequence[torch.Tensor], call: int) -> list[torch.Tensor]:
    found = find(call)
    if capture_lock.is_capturing():
        capture_lock.keep(found)
    elif get_proxy_mode() is not None:
        _named_elsewhere[call] = found
    avals = found.traced(avals_of(operands)).out_avals
    return [
        operands[0].new_empty(aval.shape, dtype=torch_dtype(aval.dtype, f"result {index} of {found.name}"))
        for index, aval in enumerate(avals)
    ]


@lowers(jax_call)
def _inlined(operands: Sequence[jax.Array], call: int) -> list[jax.Array]:
    return find(call).by_trace(*operands)


def _held(node: Node) -> JaxCall:
    number = node.args[1]
    assert isinstance(number, int)
    return find(number)


registry.keep_alive(jax_call, _held)
