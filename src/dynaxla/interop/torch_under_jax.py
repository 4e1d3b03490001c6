"""Converts torch functions on the device "jax" to functions of JAX arrays. JAX traces their ops; torch's autograd differentiates them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ..device import copies, generators, pjrt_devices, storages
from ..errors import UnsupportedTensor
from ..lowering import dtypes
from ..runtime import devices
from ..runtime.layout import row_major
from .array_conversion import check_on_one_device, check_representable, is_tracer, torch_dtype, x64_enabled

# A function from a list of tensors to a list of tensors.
FlatFunction = Callable[[list[torch.Tensor]], list[torch.Tensor]]
_FLOAT0 = jax.dtypes.float0


def as_jax_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Converts a torch function to a function of arrays: see `torch_in_jax.to_jax`, device="jax"."""
    name = str(getattr(function, "__name__", None) or type(function).__name__)

    @functools.wraps(function)
    def jax_fn(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        positions = [index for index, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]
        output_tree: list[Any] = []

        def flat(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            all_leaves = list(leaves)
            for position, tensor in zip(positions, tensors, strict=True):
                all_leaves[position] = tensor
            torch_args, torch_kwargs = jax.tree.unflatten(tree, all_leaves)
            results, results_tree = jax.tree.flatten(function(*torch_args, **torch_kwargs))
            output_tree[:] = [results_tree]
            for index, result in enumerate(results):
                if not isinstance(result, torch.Tensor):
                    raise TypeError(f"result {index} of {name} is {type(result).__name__}, not a tensor")
                hint = f"pass x.int() or x.float(), or call {name} inside jax.enable_x64(True)"
                check_representable(result, f"result {index} of {name}", x64_enabled(), hint)
            return list(results)

        results = _differentiable(flat)(*(jnp.asarray(leaves[position]) for position in positions))
        return jax.tree.unflatten(output_tree[0], results)

    return jax_fn


def _differentiable(flat: FlatFunction) -> Callable[..., Any]:
    """Converts `flat` to a function of arrays whose derivative comes from torch's autograd.

    The backward pass calls `flat` again, and is itself converted by `_differentiable`, so derivatives of any order work.
    """

    @jax.custom_vjp
    def call(*arrays: jax.Array) -> list[jax.Array]:
        with _without_draws(arrays), torch.no_grad():
            return [array_of(result) for result in flat([tensor_of(array) for array in arrays])]

    def forward(*arrays: jax.Array) -> tuple[Any, Any]:
        return call(*arrays), arrays

    def backward(arrays: Sequence[jax.Array], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        wanted = [index for index, array in enumerate(arrays) if dtypes.is_inexact(array.dtype)]
        nonzero = [index for index, cotangent in enumerate(cotangents) if cotangent.dtype != _FLOAT0]

        def pull_back(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return _pull_back(flat, tensors[: len(arrays)], wanted, dict(zip(nonzero, tensors[len(arrays) :], strict=True)))

        # For complex numbers, JAX's cotangents are the conjugates of torch's.
        gradients = iter(_differentiable(pull_back)(*arrays, *(jnp.conj(cotangents[index]) for index in nonzero)))
        return tuple(
            [jnp.conj(next(gradients)) if index in wanted else np.zeros(array.shape, _FLOAT0) for index, array in enumerate(arrays)]
        )

    call.defvjp(forward, backward)
    return call


def _pull_back(
    flat: FlatFunction, operands: list[torch.Tensor], wanted: Sequence[int], cotangents: dict[int, torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the gradients of some operands. The gradients are differentiable if an operand or a cotangent requires a gradient.

    Args:
        flat: The function.
        operands: All operands.
        wanted: The positions of the operands whose gradients are returned.
        cotangents: The cotangents of results, by the result's position.
    """
    create_graph = any(tensor.requires_grad for tensor in (*operands, *cotangents.values()))
    with torch.enable_grad():
        for index in wanted:
            if not operands[index].requires_grad:
                operands[index] = operands[index].detach().requires_grad_()
        results = flat(list(operands))
        used = [index for index in cotangents if results[index].requires_grad]
        if not used:
            return [torch.zeros_like(operands[index]) for index in wanted]
        inputs = [operands[index] for index in wanted]
        return list(
            torch.autograd.grad(
                [results[index] for index in used], inputs, [cotangents[index] for index in used],
                create_graph=create_graph, allow_unused=True, materialize_grads=True,
            )
        )  # fmt: skip


@contextlib.contextmanager
def _without_draws(arrays: Sequence[Any]) -> Any:
    """A context in which a torch function runs on arrays or tracers, and in which it raises if it draws random numbers.

    Otherwise the forward and the backward pass would draw different numbers, and each call of a compiled program would draw the same
    numbers again.
    """
    if any(map(is_tracer, arrays)):
        storages.enable_tracer_checks()
    with generators.forbid_draws():
        yield


def tensor_of(array: Any, device: torch.device | None = None) -> torch.Tensor:
    """Returns a tensor on the device "jax" that holds an array or tracer.

    Args:
        array: The array or tracer.
        device: The torch device, "jax" or "jax:N"; None for the device of the array.

    Raises:
        UnsupportedTensor: The device "jax" is not enabled, torch has no such dtype, or the array is on several devices or not on `device`.
    """
    dtype = torch_dtype(array.dtype, "the array")
    if not devices.is_registered(storages.NAME):
        raise UnsupportedTensor(
            'the array can only become a tensor on the device "jax", which is not enabled', hint="call dynaxla.device.enable() first"
        )
    device = device or torch.device(storages.NAME)
    if is_tracer(array):
        storages.enable_tracer_checks()
    else:
        check_on_one_device(array, "the array")
        if device.index is None and array.device in pjrt_devices.devices():
            device = torch.device(storages.NAME, pjrt_devices.devices().index(array.device))
    device = pjrt_devices.with_index(device)
    if not is_tracer(array) and array.device != pjrt_devices.jax_device(device.index or 0):
        raise UnsupportedTensor(f"the array is on {array.device}, not on {device}", hint="move it with jax.device_put")
    return storages.new_tensor(array.shape, row_major(array.shape), dtype, device, array)


def array_of(tensor: torch.Tensor) -> Any:
    """Returns the array of a tensor on the device "jax", in its logical shape.

    Raises:
        UnsupportedTensor: The tensor is on another device.
    """
    if tensor.device.type != storages.NAME:
        raise UnsupportedTensor(f"a result is on {tensor.device}", hint='return tensors on the device "jax": x.to("jax")')
    return copies.value_of(tensor)


@jax.custom_jvp
def not_differentiable(array: jax.Array) -> jax.Array:
    """Returns the array, and raises if JAX differentiates this function: JAX's derivative would ignore torch's `detach` and `no_grad`."""
    return array


@not_differentiable.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> Any:
    raise UnsupportedTensor(
        "JAX cannot differentiate the torch ops on dynaxla.as_torch(x)",
        hint='use dynaxla.to_jax(torch_function, device="jax"), which jax.grad can differentiate',
    )
