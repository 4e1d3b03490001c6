"""JAX functions as functions of torch tensors."""

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
from ..guards.fingerprints import NO_CONTENT, content, same
from ..guards.state_changes import Readings
from ..runtime import guards, private
from ..runtime.layout import ORDINARY
from . import jax_calls
from .array_conversion import ArrayScope, check_operands, is_tracer, x64_now
from .jax_calls import JaxCall

_numbers = itertools.count(1)


def to_torch(jax_fn: Callable[..., Any], *, x64: bool | None = None) -> Callable[..., Any]:
    """Returns a JAX function as a function of torch tensors.

    The arguments are pytrees. Tensors in them (on one device: the CPU, a GPU, or "jax") reach `jax_fn` as arrays on the same memory, which
    must not be written to before it returns; tensors that are not contiguous, or not aligned, are copied. Other leaves are passed
    unchanged. Arrays and numbers in the result of `jax_fn` become tensors on the same device, with their own memory.

    Gradients are those of `jax.vjp`, of any order; `torch.func.grad` and `torch.func.vmap` work, too. Integers have no gradient, and
    complex numbers follow torch's convention. Inside `torch.compile(backend="dynaxla")` and `dynaxla.compile_step` the function becomes
    part of the XLA program, forward and backward; its Python code then runs during torch's capture, and again when something that it reads
    (a closure, a global) has changed. The sizes of its arguments are static there: other sizes need another capture.

    Args:
        x64: `jax_fn` runs with JAX's 64-bit types on (True) or off (False); None: as JAX is configured at the call. While they are off,
            64-bit tensors are refused, because JAX would cut them to 32 bits.

    Raises:
        TypeError: `jax_fn` is not callable. A call raises the exceptions of `jax_fn`, UnsupportedTensor and DeviceMismatch.
    """
    if not callable(jax_fn):
        right = "; dynaxla.as_torch takes an array" if isinstance(jax_fn, jax.Array) else ""
        raise TypeError(f"to_torch takes a function of JAX arrays, not {type(jax_fn).__name__}{right}")
    torch_fn = functools.wraps(jax_fn)(private.skipped_by_dynamo(JaxInTorch(jax_fn, x64)))
    if not guards.CAN_GUARD_RESULTS:
        return torch.compiler.disable(torch_fn)
    found = torch._dynamo.nonstrict_trace(torch_fn)
    found.__code__ = found.__code__.replace()  # a code object of its own, since TorchDynamo's guards identify a function by its code
    return found


@guards.guards_its_state
class JaxInTorch:
    """The implementation of a function of `to_torch`.

    Attributes:
        __wrapped__: The JAX function.
    """

    def __init__(self, jax_fn: Callable[..., Any], x64: bool | None) -> None:
        self.__wrapped__ = jax_fn
        self._x64 = x64
        self._name = str(getattr(jax_fn, "__name__", None) or type(jax_fn).__name__)
        self._calls: dict[Any, _Flat] = {}
        self._readings = Readings({"jax_fn": jax_fn})
        self._stamp = 0
        self._number = next(_numbers)
        _owners[self._number] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        leaves = [_number(leaf) for leaf in leaves]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if _is_traced(tensors):  # NumPy arrays become tensors, so that the trace sees that they are read
            leaves = [torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
            tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        x64 = x64_now() if self._x64 is None else self._x64
        if not _is_traced(tensors):
            flat = _Flat(self.__wrapped__, tree, leaves, self._name, x64)
            return flat.unflatten(apply(flat.call, tensors))
        _refuse_arrays(leaves, self._name)
        check_operands(tensors, self._name, x64)
        stamp = self.stamp()
        guards.guard_on_result("dynaxla", ("interop", "jax_in_torch", "answers", f"of_{self._number}"))
        key = tree, x64, stamp, tuple([None if isinstance(leaf, torch.Tensor) else _fact(leaf) for leaf in leaves])
        known = self._calls.get(key)
        if known is None:
            known = self._calls[key] = _Flat(self.__wrapped__, tree, leaves, self._name, x64)
        results = apply(known.call.of_trace(), tensors or [torch.zeros(())])
        return known.unflatten(results, jax_calls.avals_of(tensors))

    def stamp(self) -> int:
        """Returns a number that changes when something that the function reads has changed: closures, globals, attributes, arrays."""
        stamp = self._readings.stamp()
        if stamp != self._stamp:
            self._stamp = stamp
            self._calls.clear()
        return stamp

    def answer(self) -> str:
        """Returns the state on which a captured graph with this function depends, besides its arguments. TorchDynamo guards on it."""
        return f"{self.stamp()} {x64_now()} {jax.config.jax_default_matmul_precision} {jax.config.jax_numpy_dtype_promotion}"


_owners: weakref.WeakValueDictionary[int, JaxInTorch] = weakref.WeakValueDictionary()


class _Answers:
    """An object whose attribute "of_N" is a function that returns the answer of torch function N, or "" if that no longer exists.

    TorchDynamo's guards call it.
    """

    def __getattr__(self, name: str) -> Callable[[], str]:
        if not name.startswith("of_"):
            raise AttributeError(name)
        owner = _owners.get(int(name.removeprefix("of_")))
        return str if owner is None else owner.answer


answers = _Answers()


class _Flat:
    """A JAX function of the tensors among its arguments; all other arguments are fixed.

    Attributes:
        call: The function of flat arrays, as a `JaxCall`.
    """

    def __init__(self, function: Callable[..., Any], tree: Any, leaves: Sequence[Any], name: str, x64: bool) -> None:
        positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        rest = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        trees: dict[Any, Any] = {}

        def flat(*arrays: jax.Array) -> list[Any]:
            every = list(rest)
            for position, array in zip(positions, arrays, strict=False):
                every[position] = array
            args, kwargs = jax.tree.unflatten(tree, every)
            results, found = jax.tree.flatten(function(*args, **kwargs))
            trees[jax_calls.avals_of(arrays[: len(positions)])] = trees[None] = found
            return results

        self._trees = trees
        self.call = JaxCall(flat, name, x64)

    def unflatten(self, results: Sequence[torch.Tensor], avals: Any = None) -> Any:
        """Arranges the tensors in the structure of the function's results.

        Args:
            avals: The operands' shapes and dtypes, if the call was traced for several.
        """
        return jax.tree.unflatten(self._trees[avals], results)


def apply(call: JaxCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns the call's results, with gradients where autograd needs them."""
    if private.functorch_level() is not None:
        return list(_Differentiable.apply(_Pass(call), *tensors))
    wanted = tuple([index for index, tensor in enumerate(tensors) if tensor.requires_grad]) if torch.is_grad_enabled() else ()
    if wanted:
        return list(_Differentiable.apply(_Pass(call, wanted), *tensors))
    return _plain(call, tensors)


def _plain(call: JaxCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return jax_calls.jax_call(list(tensors), call.number) if _is_traced(tensors) else jax_calls.run(call, tensors)


def _is_traced(tensors: Sequence[torch.Tensor]) -> bool:
    """True if torch traces the call, or if a dispatch mode observes its ops."""
    return private.mode_count() > 0 or any(type(tensor) not in ORDINARY for tensor in tensors)


@dataclass
class _Pass:
    """A call on its way through autograd.

    Attributes:
        call: The call.
        wanted: The positions of the operands whose gradients are needed; () if they are known only later.
        pull: Computes these gradients from the cotangents of the inexact results.
    """

    call: JaxCall
    wanted: tuple[int, ...] = ()
    pull: Callable[[Sequence[jax.Array]], list[jax.Array]] | None = None


class _Differentiable(torch.autograd.Function):
    """A call whose gradients JAX computes.

    The backward pass calls the pullback that `jax.vjp` returned in the forward pass. Where the backward pass is differentiated itself, or
    traced, it uses the call's derivative as a separate call instead.
    """

    @staticmethod
    def forward(taken: _Pass, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if not taken.wanted or _is_traced(tensors):
            return tuple(_plain(taken.call, tensors))
        call = taken.call
        with ArrayScope(tensors, call.name, call.x64) as border:
            results, taken.pull = jax_calls.vjp(call.function, border.arrays, taken.wanted)
            return tuple(border.take(results))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        taken, *tensors = inputs
        ctx.taken = taken
        ctx.given = tuple([index for index, result in enumerate(output) if _is_inexact(result)])
        ctx.mark_non_differentiable(*[result for result in output if not _is_inexact(result)])
        ctx.save_for_backward(*tensors)  # all of them, so that autograd detects later writes to them

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tensors, taken = ctx.saved_tensors, ctx.taken
        wanted = tuple([index for index, tensor in enumerate(tensors) if ctx.needs_input_grad[index + 1] and _is_inexact(tensor)])
        given = [cotangents[index] for index in ctx.given]
        call = taken.call
        if taken.pull is not None and not torch.is_grad_enabled() and not _is_traced(given) and set(wanted) <= set(taken.wanted):
            with ArrayScope(given, call.name, call.x64) as border:
                gradients = dict(zip(taken.wanted, border.take(taken.pull(border.arrays)), strict=True))
        else:
            found = apply(call.backward(wanted, len(tensors)), [*tensors, *given])
            gradients = dict(zip(wanted, found, strict=True))
        return None, *[gradients[index] if index in wanted else None for index in range(len(tensors))]

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        raise DynaxlaError(
            f"{ctx.taken.call.name}, a function of to_torch, does not support torch's forward-mode derivatives",
            hint="use reverse mode (torch.func.vjp, torch.func.jacrev), or call jax.jvp inside the JAX function",
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, taken: _Pass, *tensors: torch.Tensor) -> Any:
        results = apply(taken.call.batched(tuple(in_dims[1:])), tensors)
        return tuple(results), (0,) * len(results)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _number(leaf: Any) -> Any:
    """Returns a symbolic number as a plain number, which torch guards on."""
    if isinstance(leaf, (torch.SymInt, torch.SymBool)):
        return int(leaf) if isinstance(leaf, torch.SymInt) else bool(leaf)
    return float(leaf) if isinstance(leaf, torch.SymFloat) else leaf


def _fact(leaf: Any) -> Any:
    """Returns a hashable value that is equal for equal leaves. For a leaf whose content may change it is equal to no other value."""
    if isinstance(leaf, jax.Array):
        return same(leaf)
    found = content(leaf)
    return object() if found is NO_CONTENT else found


def _refuse_arrays(leaves: Sequence[Any], name: str) -> None:
    for leaf in leaves:
        if is_tracer(leaf):
            raise UnsupportedTensor(
                f"{name} was called with a JAX tracer while torch is tracing, too",
                hint="pass it as a tensor: dynaxla.as_torch(x)",
            )
