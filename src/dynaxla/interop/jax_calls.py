"""The torch op that calls a JAX function: `dynaxla::jax_call(operands, call)`, where `call` is the number of a `JaxCall`.

The op is pure. In dynaxla's graphs it is lowered to the JAX function, which becomes part of the program; other backends call it like any
custom op. The function is traced once for given shapes and dtypes, so the forward and the backward pass of a graph use the same jaxpr, even
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
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from ..artifact.xla_options import jit_with_cpu_options
from ..errors import DynaxlaError
from ..lowering import dtypes, lowers
from ..lowering.registry import registry
from ..runtime import capture_lock, private
from .array_conversion import ArrayScope, torch_dtype

_numbers = itertools.count(1)
_calls: weakref.WeakValueDictionary[int, JaxCall] = weakref.WeakValueDictionary()
# Calls in graphs of other backends. Such graphs hold no reference to their calls, so this dict keeps the calls alive forever.
_calls_in_other_graphs: dict[int, JaxCall] = {}

# The shape and the JAX dtype of each operand.
Avals = tuple[tuple[tuple[int, ...], np.dtype], ...]


class JaxCall:
    """A JAX function from arrays to a list of arrays, with a number that identifies it in torch's graphs.

    Args:
        function: Takes an array for each operand.
        name: The function's name, for errors.
        x64: True if the function runs with JAX's 64-bit types enabled.
    """

    def __init__(self, function: Callable[..., Sequence[Any]], name: str, x64: bool) -> None:
        self.function, self.name, self.x64 = function, name, x64
        self.number = next(_numbers)
        self._traces: dict[Avals, Any] = {}
        self._derived: dict[Any, JaxCall] = {}
        _calls[self.number] = self

    def jaxpr_for(self, avals: Avals) -> Any:
        """Returns the function's jaxpr for operands with these shapes and dtypes, traced at the first request."""
        if avals not in self._traces:
            with jax.enable_x64(self.x64):
                operands = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in avals]
                self._traces[avals] = jax.make_jaxpr(self.function)(*operands)
        return self._traces[avals]

    def run_jaxpr(self, *operands: jax.Array) -> list[jax.Array]:
        """Computes the function's results by its jaxpr. The operands may be tracers."""
        with jax.enable_x64(self.x64):
            return list(jax.extend.core.jaxpr_as_fun(self.jaxpr_for(avals_of(operands)))(*operands))

    def traced_call(self) -> JaxCall:
        """Returns a call that runs this call's jaxpr. The results of the function may change later, for example with a global."""
        return self._derive("trace", lambda: self.run_jaxpr)

    @functools.cached_property
    def compiled(self) -> Callable[..., list[jax.Array]]:
        """The function, compiled by XLA. Only for calls from `traced_call`, whose function never changes."""
        return jit_with_cpu_options(self.function)

    def backward(self, wanted: tuple[int, ...], count: int) -> JaxCall:
        """Returns the call of the backward pass.

        It takes the operands, then the cotangents of the inexact results, and returns the cotangents of the wanted operands.

        Args:
            wanted: The positions of the operands whose cotangents are returned.
            count: The number of operands.
        """

        def backward(*arrays: jax.Array) -> list[jax.Array]:
            _, pull_back = vjp(self.function, arrays[:count], wanted)
            return pull_back(arrays[count:])

        return self._derive(("backward", wanted), lambda: backward)

    def batched(self, dims: tuple[int | None, ...]) -> JaxCall:
        """Returns the call mapped by `jax.vmap`. The mapped dimension is dimension 0 of the results.

        Args:
            dims: For each operand, the dimension that is mapped; None for an operand that is not mapped.
        """
        return self._derive(("batched", dims), lambda: jax.vmap(self.function, in_axes=dims))

    def _derive(self, key: Any, make: Callable[[], Callable[..., Sequence[Any]]]) -> JaxCall:
        """Returns a call with this call's name, for the function that `make` returns. Each key has one call."""
        if key not in self._derived:
            self._derived[key] = JaxCall(make(), self.name, self.x64)
        return self._derived[key]


def vjp(
    function: Callable[..., Sequence[Any]], operands: Sequence[jax.Array], wanted: Sequence[int]
) -> tuple[list[jax.Array], Callable[[Sequence[jax.Array]], list[jax.Array]]]:
    """Returns the function's results and its pullback.

    The pullback takes a cotangent for each inexact result, and returns the cotangents of the wanted operands. All cotangents follow torch's
    convention for complex numbers: they are the conjugates of JAX's cotangents.

    Args:
        function: A function from arrays to a list of arrays.
        operands: Its operands.
        wanted: The positions of the operands whose cotangents the pullback returns.
    """

    def differentiated(*values: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        all_operands = list(operands)
        for position, value in zip(wanted, values, strict=True):
            all_operands[position] = value
        results = [jnp.asarray(result) for result in function(*all_operands)]
        return [result for result in results if dtypes.is_inexact(result.dtype)], results

    _, pull, results = jax.vjp(differentiated, *(operands[position] for position in wanted), has_aux=True)

    def pull_back(cotangents: Sequence[jax.Array]) -> list[jax.Array]:
        return [jnp.conj(value) for value in pull([jnp.conj(value) for value in cotangents])]

    return results, pull_back


def avals_of(operands: Sequence[Any]) -> Avals:
    """Returns the shapes and dtypes of arrays or torch tensors. Symbolic sizes become numbers: functions are traced for fixed sizes."""
    return tuple([(tuple(int(size) for size in operand.shape), _dtype(operand)) for operand in operands])


def _dtype(operand: Any) -> np.dtype:
    return dtypes.to_jax(operand.dtype) if isinstance(operand, torch.Tensor) else np.dtype(operand.dtype)


def find_call(number: int) -> JaxCall:
    """Returns the call with this number.

    Raises:
        DynaxlaError: The call no longer exists.
    """
    call = _calls.get(number)
    if call is None:
        raise DynaxlaError(
            f"the JAX function of call {number} no longer exists: it was deleted, or the graph comes from another process",
            hint="call the function that dynaxla.to_torch returned, and capture the graph again",
        )
    return call


def run(call: JaxCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Calls a call's JAX function eagerly with tensors: the function is neither traced nor compiled as a whole."""
    with ArrayScope(tensors, call.name, call.x64) as scope:
        return scope.to_tensors(list(call.function(*scope.arrays)))


_library = torch.library.Library("dynaxla", "FRAGMENT")
private.register_own_libraries(_library)
_library.define("jax_call(Tensor[] operands, int call) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
jax_call = torch.ops.dynaxla.jax_call.default


def _run(operands: Sequence[torch.Tensor], call: int) -> list[torch.Tensor]:
    jax_function = find_call(call)
    with ArrayScope(operands, jax_function.name, jax_function.x64) as scope:
        return scope.to_tensors(list(jax_function.compiled(*scope.arrays)))


_library.impl("jax_call", private.skipped_by_dynamo(_run), "CompositeExplicitAutograd")


@torch.library.register_fake("dynaxla::jax_call", lib=_library)
def _fake(operands: Sequence[torch.Tensor], call: int) -> list[torch.Tensor]:
    jax_function = find_call(call)
    if capture_lock.is_capturing():
        capture_lock.keep(jax_function)
    elif get_proxy_mode() is not None:
        _calls_in_other_graphs[call] = jax_function
    avals = jax_function.jaxpr_for(avals_of(operands)).out_avals
    return [
        operands[0].new_empty(aval.shape, dtype=torch_dtype(aval.dtype, f"result {index} of {jax_function.name}"))
        for index, aval in enumerate(avals)
    ]


@lowers(jax_call)
def _lower_jax_call(operands: Sequence[jax.Array], call: int) -> list[jax.Array]:
    return find_call(call).run_jaxpr(*operands)


def _call_of_node(node: Node) -> JaxCall:
    number = node.args[1]
    assert isinstance(number, int)
    return find_call(number)


registry.keep_alive(jax_call, _call_of_node)
