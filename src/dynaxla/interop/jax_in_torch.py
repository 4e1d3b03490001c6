"""Converts JAX functions to functions of torch tensors."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch

from ..errors import DynaxlaError, UnsupportedTensor
from ..guards.fingerprints import NO_FINGERPRINT, fingerprint, identity_of
from ..guards.state_changes import StateChangeDetector
from ..runtime import guards, private
from ..runtime.layout import ORDINARY
from . import jax_calls
from .array_conversion import ArrayScope, check_operands, is_tracer, x64_enabled
from .jax_calls import JaxCall

# The numbers of `JaxInTorch` objects (see `_GuardValues`).
_numbers = itertools.count(1)


def to_torch(jax_fn: Callable[..., Any], *, x64: bool | None = None) -> Callable[..., Any]:
    """Converts a JAX function to a function of torch tensors.

    The arguments are pytrees. Their tensors must be on one device: the CPU, a GPU, or "jax". `jax_fn` gets the tensors as arrays on the
    same memory, to which nobody must write before the call returns. Tensors that are not contiguous, or not aligned, are copied. `jax_fn`
    gets other leaves unchanged. Arrays and numbers in the result of `jax_fn` become tensors on the same device, with their own memory.

    Gradients of any order come from `jax.vjp`; `torch.func.grad` and `torch.func.vmap` work too. Integers have no gradient. Gradients of
    complex numbers follow torch's convention. Inside `torch.compile(backend="dynaxla")` and `dynaxla.compile_step` the function becomes
    part of the XLA program, forward and backward. Its Python code then runs only during torch's capture, which is repeated when something
    that the code reads (a closure, a global) has changed. A capture is for fixed sizes of the arguments: other sizes need another capture.

    Args:
        jax_fn: The function.
        x64: True or False: `jax_fn` runs with JAX's 64-bit types on or off. None: as JAX is configured at the call. While 64-bit types are
            off, 64-bit tensors are refused, since JAX would convert them to 32 bits.

    Raises:
        TypeError: `jax_fn` is not callable. A call raises the exceptions of `jax_fn`, UnsupportedTensor and DeviceMismatch.
    """
    if not callable(jax_fn):
        hint = "; dynaxla.as_torch takes an array" if isinstance(jax_fn, jax.Array) else ""
        raise TypeError(f"to_torch takes a function of JAX arrays, not {type(jax_fn).__name__}{hint}")
    torch_fn = functools.wraps(jax_fn)(private.skipped_by_dynamo(JaxInTorch(jax_fn, x64)))
    if not guards.CAN_GUARD_RESULTS:
        return torch.compiler.disable(torch_fn)
    traceable_fn = torch._dynamo.nonstrict_trace(torch_fn)
    # TorchDynamo's guards identify a function by its code object, so each converted function gets its own.
    traceable_fn.__code__ = traceable_fn.__code__.replace()
    return traceable_fn


@guards.guards_its_state
class JaxInTorch:
    """The implementation of a function that `to_torch` returns.

    Attributes:
        __wrapped__: The JAX function.
    """

    def __init__(self, jax_fn: Callable[..., Any], x64: bool | None) -> None:
        self.__wrapped__ = jax_fn
        self._x64 = x64
        self._name = str(getattr(jax_fn, "__name__", None) or type(jax_fn).__name__)
        self._flat_functions: dict[Any, _FlatFunction] = {}  # for captured graphs, by the arguments other than tensors
        self._state_changes = StateChangeDetector({"jax_fn": jax_fn})
        self._stamp = 0
        self._number = next(_numbers)
        _functions_by_number[self._number] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        leaves = [_plain_number(leaf) for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if _is_traced(tensors):  # NumPy arrays become tensors, so that the trace sees that the function reads them
            leaves = [torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        x64 = x64_enabled() if self._x64 is None else self._x64
        if not _is_traced(tensors):
            flat = _FlatFunction(self.__wrapped__, tree, leaves, self._name, x64)
            return flat.unflatten(apply(flat.call, tensors))
        _refuse_tracers(leaves, self._name)
        check_operands(tensors, self._name, x64)
        self.stamp()  # clears `_flat_functions` if the state has changed
        guards.guard_on_result("dynaxla", ("interop", "jax_in_torch", "guard_values", f"of_{self._number}"))
        key = tree, x64, tuple([None if isinstance(leaf, torch.Tensor) else _cache_key(leaf) for leaf in leaves])
        flat_function = self._flat_functions.get(key)
        if flat_function is None:
            flat_function = self._flat_functions[key] = _FlatFunction(self.__wrapped__, tree, leaves, self._name, x64)
        # The op creates its fake results from its first operand, so a call without tensors passes one that `_FlatFunction` ignores.
        results = apply(flat_function.call.traced_call(), tensors or [torch.zeros(())])
        return flat_function.unflatten(results, jax_calls.avals_of(tensors))

    def stamp(self) -> int:
        """Returns a number that changes when state that the JAX function reads (closures, globals, attributes, arrays) has changed."""
        stamp = self._state_changes.stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            self._flat_functions.clear()
        return stamp

    def guard_value(self) -> str:
        """Returns a text that changes when state changes on which a captured graph with this function depends, except its arguments.

        TorchDynamo's guard compares the text with the text at the time of capture.
        """
        return f"{self.stamp()} {x64_enabled()} {jax.config.jax_default_matmul_precision} {jax.config.jax_numpy_dtype_promotion}"


_functions_by_number: weakref.WeakValueDictionary[int, JaxInTorch] = weakref.WeakValueDictionary()


class _GuardValues:
    """Gives TorchDynamo's guards access to `JaxInTorch.guard_value`.

    The attribute "of_N" is the method `guard_value` of the `JaxInTorch` with the number N. If that object no longer exists, the attribute
    is a function that returns "".
    """

    def __getattr__(self, name: str) -> Callable[[], str]:
        if not name.startswith("of_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        function = _functions_by_number.get(int(name.removeprefix("of_")))
        return str if function is None else function.guard_value


guard_values = _GuardValues()


class _FlatFunction:
    """A JAX function as a function of the tensors among its arguments. All other arguments are fixed.

    Args:
        function: The JAX function.
        tree: The pytree structure of its arguments.
        leaves: The leaves of its arguments.
        name: The function's name, for errors.
        x64: True if the function runs with JAX's 64-bit types enabled.

    Attributes:
        call: The function from a list of arrays to a list of arrays, as a `JaxCall`.
    """

    def __init__(self, function: Callable[..., Any], tree: Any, leaves: Sequence[Any], name: str, x64: bool) -> None:
        positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        fixed_leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        trees: dict[Any, Any] = {}

        def flat(*arrays: jax.Array) -> list[Any]:
            all_leaves = list(fixed_leaves)
            for position, array in zip(positions, arrays, strict=False):
                all_leaves[position] = array
            args, kwargs = jax.tree.unflatten(tree, all_leaves)
            results, result_tree = jax.tree.flatten(function(*args, **kwargs))
            trees[jax_calls.avals_of(arrays[: len(positions)])] = trees[None] = result_tree
            return results

        self._trees = trees
        self.call = JaxCall(flat, name, x64)

    def unflatten(self, results: Sequence[torch.Tensor], avals: Any = None) -> Any:
        """Arranges the result tensors in the pytree structure of the JAX function's result.

        Args:
            results: The tensors.
            avals: The shapes and dtypes of the operands, which select the trace. None: the structure of the last call or trace.
        """
        return jax.tree.unflatten(self._trees[avals], results)


def apply(call: JaxCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Computes the call's results, through autograd if an operand requires a gradient."""
    if private.functorch_level() is not None:
        return list(_Differentiable.apply(_AutogradCall(call), *tensors))
    wanted = tuple([index for index, tensor in enumerate(tensors) if tensor.requires_grad]) if torch.is_grad_enabled() else ()
    if wanted:
        return list(_Differentiable.apply(_AutogradCall(call, wanted), *tensors))
    return _call_without_gradients(call, tensors)


def _call_without_gradients(call: JaxCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return jax_calls.jax_call(list(tensors), call.number) if _is_traced(tensors) else jax_calls.run(call, tensors)


def _is_traced(tensors: Sequence[torch.Tensor]) -> bool:
    """True if torch traces a call with these tensors, or if a dispatch mode or a tensor subclass must see the op `jax_call`."""
    return private.mode_count() > 0 or any(type(tensor) not in ORDINARY for tensor in tensors)


@dataclass
class _AutogradCall:
    """A call that autograd records.

    Attributes:
        call: The call.
        wanted: The positions of the operands whose gradients are needed; () if the positions are not known before the backward pass.
        pullback: Computes the gradients of the `wanted` operands from the cotangents of the inexact results. None: the backward pass runs
            `JaxCall.backward`.
    """

    call: JaxCall
    wanted: tuple[int, ...] = ()
    pullback: Callable[[Sequence[jax.Array]], list[jax.Array]] | None = None


class _Differentiable(torch.autograd.Function):
    """A call whose gradients JAX computes.

    The backward pass calls the pullback that `jax.vjp` returned in the forward pass. It runs `JaxCall.backward` instead under `torch.func`,
    if torch traces one of the passes, or if the backward pass is itself differentiated.
    """

    @staticmethod
    def forward(autograd_call: _AutogradCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not autograd_call.wanted or _is_traced(tensors):
            return tuple(_call_without_gradients(autograd_call.call, tensors))
        call = autograd_call.call
        with ArrayScope(tensors, call.name, call.x64) as scope:
            results, autograd_call.pullback = jax_calls.vjp(call.function, scope.arrays, autograd_call.wanted)
            return tuple(scope.to_tensors(results))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        autograd_call, *tensors = inputs
        ctx.autograd_call = autograd_call
        ctx.inexact_results = tuple([index for index, result in enumerate(output) if _is_inexact(result)])
        ctx.mark_non_differentiable(*[result for result in output if not _is_inexact(result)])
        ctx.save_for_backward(*tensors)  # all tensors, so that autograd detects later writes to them

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors, autograd_call = ctx.saved_tensors, ctx.autograd_call
        wanted = tuple([index for index, tensor in enumerate(tensors) if ctx.needs_input_grad[index + 1] and _is_inexact(tensor)])
        result_cotangents = [cotangents[index] for index in ctx.inexact_results]
        call = autograd_call.call
        if (
            autograd_call.pullback is not None
            and not torch.is_grad_enabled()
            and not _is_traced(result_cotangents)
            and set(wanted) <= set(autograd_call.wanted)
        ):
            with ArrayScope(result_cotangents, call.name, call.x64) as scope:
                gradients = dict(zip(autograd_call.wanted, scope.to_tensors(autograd_call.pullback(scope.arrays)), strict=True))
        else:
            gradient_list = apply(call.backward(wanted, len(tensors)), [*tensors, *result_cotangents])
            gradients = dict(zip(wanted, gradient_list, strict=True))
        return None, *[gradients[index] if index in wanted else None for index in range(len(tensors))]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise DynaxlaError(
            f"{ctx.autograd_call.call.name}, a function that to_torch returned, does not support torch's forward-mode derivatives",
            hint="use reverse mode (torch.func.vjp, torch.func.jacrev), or call jax.jvp inside the JAX function",
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, autograd_call: _AutogradCall, *tensors: torch.Tensor) -> Any:
        results = apply(autograd_call.call.batched(tuple(in_dims[1:])), tensors)
        return tuple(results), (0,) * len(results)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _plain_number(leaf: Any) -> Any:
    """Converts a symbolic number to a plain number; torch adds a guard on its value. Other leaves stay as they are."""
    if isinstance(leaf, (torch.SymInt, torch.SymBool)):
        return int(leaf) if isinstance(leaf, torch.SymInt) else bool(leaf)
    return float(leaf) if isinstance(leaf, torch.SymFloat) else leaf


def _cache_key(leaf: Any) -> Any:
    """Returns a hashable key of an argument's leaf: an array's identity, or a fingerprint. Any other leaf has a new key in each call."""
    if isinstance(leaf, jax.Array):
        return identity_of(leaf)
    found = fingerprint(leaf)
    return object() if found is NO_FINGERPRINT else found


def _refuse_tracers(leaves: Sequence[Any], name: str) -> None:
    """Raises UnsupportedTensor if a leaf is a JAX tracer."""
    for leaf in leaves:
        if is_tracer(leaf):
            raise UnsupportedTensor(
                f"{name} was called with a JAX tracer inside a function that torch traces",
                hint="pass the tracer as a tensor: dynaxla.as_torch(x)",
            )
