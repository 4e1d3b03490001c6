"""Converts PyTorch modules and functions to pure functions of JAX arrays: `to_jax`."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, overload

import jax
import numpy as np
import torch
from jax import Array
from jax import numpy as jnp
from torch import nn

from ..capture.inputs import check_tensor
from ..errors import ArgumentError, CaptureError, OptionError
from ..guards.state_changes import StateChangeDetector
from ..guards.torch_state import global_state
from ..lowering import dtypes
from ..lowering.interpreter import to_numpy
from ..runtime import private
from .torch_graphs import GraphOperand, TorchCall
from .torch_under_jax import as_jax_function
from .wide_calls import narrowed


@overload
def to_jax(
    function: nn.Module, *, method: str | None = None, dtype: Any = None, share: bool = False
) -> tuple[JaxModule, dict[str, Array]]: ...


@overload
def to_jax(function: Callable[..., Any], *, device: Literal["cpu", "jax"] = "cpu") -> Callable[..., Any]: ...


def to_jax(
    function: Any, *, method: str | None = None, dtype: Any = None, share: bool = False, device: Literal["cpu", "jax"] = "cpu"
) -> Any:
    """Converts a PyTorch module or function to a pure function for JAX. `dynaxla.as_jax` converts tensors.

    For a module, this returns the function and the module's parameters, by name:

        jax_fn, params = dynaxla.to_jax(model)
        y = jax_fn(params, x)                                    # under jax.jit, grad, vmap, jvp, lax.scan, shard_map, ...
        y = jax_fn(params, x, rng=jax.random.key(0))             # where the model draws random numbers
        y, buffers = jax_fn(params, x, buffers=jax_fn.buffers)   # where the model changes buffers, like a batch norm in training mode

    For a function of tensors, this returns the function alone:

        jax_fn = dynaxla.to_jax(torch.nn.functional.normalize)
        y = jax_fn(x)

    docs/torch-in-jax.md describes both cases. `JaxModule` describes the function of a module.

    Args:
        function: The module or function, compiled by `torch.compile` or not.
        method: The name of the module's method to convert, e.g. "encode". None: a call of the module.
        dtype: The dtype of a module's floating-point parameters and buffers, as in `module.to(dtype)`.
        share: True: on the CPU, `params` and `buffers` use the module's own memory, without copies, except of integers that 32-bit JAX
            narrows. JAX assumes that arrays never change: while these arrays exist, the module's parameters and buffers must not be written
            to (no optimizer step, no `load_state_dict`, no batch norm in training mode).
        device: The device of the tensors that a function takes. "cpu": the function is captured as a graph, once for each combination of
            shapes. "jax", after `dynaxla.device.enable()`: the function runs each time that JAX calls or traces it, and its ops become part
            of JAX's program. Such a function may be compiled, and must not draw random numbers. Tensors in its closure, such as parameters,
            are constants. `jax.grad` calls torch's autograd. Eager mode's checks of a tensor's values are not performed.

    Raises:
        ArgumentError: `function` is not callable, or the module has no such method.
        OptionError: An invalid option.
        UnsupportedTensor: JAX cannot hold a parameter or buffer.
    """
    if device not in ("cpu", "jax"):
        raise OptionError(f"option device={device!r} of to_jax", hint='give "cpu" or "jax"')
    original, function = function, private.uncompiled(function)
    owner = function if isinstance(function, nn.Module) else private.uncompiled(getattr(function, "__self__", None))
    if isinstance(owner, nn.Module):
        if device != "cpu":
            hint = "leave device out; a function that calls the module, lambda x: module(x), has its parameters as constants"
            raise OptionError("option device of to_jax for a module, whose parameters have a device", hint=hint)
        module = JaxModule(owner, _method(owner, function, method), _dtype(dtype), share)
        return module, dict(module.initial)
    if not callable(function):
        hint = "dynaxla.as_jax takes a tensor" if isinstance(function, torch.Tensor) else "pass an object that can be called"
        raise ArgumentError(f"to_jax takes a module or a function, not a {type(function).__name__}", hint=hint)
    if method is not None or dtype is not None or share:
        given = [f"{name}={value!r}" for name, value in (("method", method), ("dtype", dtype), ("share", share)) if value]
        message = f"to_jax got {', '.join(given)} with a function: these options are for modules"
        raise OptionError(message, hint="leave them out, or pass the module")
    return as_jax_function(original) if device == "jax" else JaxFunction(function)


def _method(module: nn.Module, function: Any, name: str | None) -> Any:
    """Returns the method of a module that `to_jax` converts; None for a call of the module.

    Args:
        module: The module.
        function: The argument of `to_jax`: the module, or (deprecated) a bound method of the module.
        name: The option `method` of `to_jax`.
    """
    if function is not module:
        given = getattr(function, "__name__", "method")
        if name is not None:
            raise OptionError(f"to_jax got the method {given} and the option method={name!r}", hint="pass the module")
        text = f"dynaxla.to_jax(module.{given}) is now dynaxla.to_jax(module, method={given!r}); dynaxla 0.2 removes the old form"
        warnings.warn(text, DeprecationWarning, stacklevel=3)
        return function
    method = None if name is None else private.uncompiled(getattr(module, name, None))
    if name is not None and not callable(method):
        raise ArgumentError(f"{type(module).__name__} has no method {name!r}", hint="give the name of a method of the module")
    return method


class _CapturedFunction:
    """Base class of torch functions as JAX functions. Caches captured graphs by the arguments' structure, shapes, dtypes and constants."""

    def __init__(self, name: str, state_changes: StateChangeDetector) -> None:
        self._state_changes = state_changes
        self.__name__ = self.__qualname__ = name
        self._device = torch.device("cpu")

    def _evaluate(
        self,
        run: Callable[[Sequence[torch.Tensor], tuple[Any, ...], dict[str, Any]], tuple[Any, Sequence[torch.Tensor]]],
        state: Mapping[str, tuple[Any, GraphOperand]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        rng: Any,
    ) -> tuple[Any, list[Array], TorchCall]:
        """Evaluates a call of the JAX function.

        Args:
            run: The torch function. Takes a list of tensors for the state, then args and kwargs with tensors in place of arrays. Returns
                the result and the new values of the buffers.
            state: For each parameter and buffer, by name, the array and the graph's operand for the array.
            args: The arguments of the call, with arrays.
            kwargs: The keyword arguments of the call, with arrays.
            rng: The key of `jax.random`, or None.

        Returns:
            The function's result, the new values of the buffers, and the captured graph.
        """
        if torch.is_autocast_enabled(self._device.type):
            raise ArgumentError(f"{self.__name__} is called inside torch.autocast", hint="use torch.autocast inside the torch function")
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        is_array = [self._is_array(leaf) for leaf in leaves]
        array_leaves = [jnp.asarray(leaf) for leaf, array in zip(leaves, is_array, strict=True) if array]
        fixed = [leaf for leaf, array in zip(leaves, is_array, strict=True) if not array]
        # The repr is part of the key because 0.0 and -0.0 are equal.
        statics = tuple((type(leaf), leaf, repr(leaf) if isinstance(leaf, (float, complex)) else "") for leaf in fixed)
        narrow = not jax.config.jax_enable_x64
        operands = [operand for _, operand in state.values()] + [_argument(leaf, narrow) for leaf in array_leaves]
        stamp = self._state_changes.stamp()
        key = tree, tuple(is_array), statics, tuple(operands), narrow, stamp, global_state()
        cached: tuple[TorchCall, Any] | None = self._state_changes.captured.get(key)
        if cached is None or not cached[0].is_current():
            structure: list[Any] = []
            count = len(state)

            def function(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
                array_arguments, static_arguments = iter([tensor.clone() for tensor in tensors[count:]]), iter(fixed)
                arguments = [next(array_arguments if array else static_arguments) for array in is_array]
                result, new_state = run(tensors[:count], *jax.tree_util.tree_unflatten(tree, arguments))
                result_tensors: list[torch.Tensor] = []
                structure[:] = [_flatten_result(result, result_tensors)]
                return [tensor.clone() for tensor in (*result_tensors, *new_state)]

            call = TorchCall(function, operands, self._device, narrow, lambda: self._state_changes.stamp() == stamp)
            cached = call, structure[0]
            self._state_changes.captured.put(key, cached)
        call, structure_of_result = cached
        keys = [_key_data(rng, self.__name__, call.drawing_line)] if call.draws_random else []
        outputs = iter(call([*keys, *(jnp.asarray(value) for value, _ in state.values()), *array_leaves]))
        return _unflatten_result(structure_of_result, outputs), list(outputs), call

    def _is_array(self, argument: Any) -> bool:
        """True if an argument of a call is an array. Raises ArgumentError if it is a tensor, or neither an array nor hashable."""
        if isinstance(argument, torch.Tensor):
            raise ArgumentError(
                f"{self.__name__} is a JAX function, and was called with a torch tensor",
                hint="pass a JAX array: jnp.asarray(tensor.numpy())",
            )
        is_array = isinstance(argument, (Array, np.ndarray, np.generic))
        if not is_array and type(argument).__hash__ is None:
            raise ArgumentError(f"an argument of {self.__name__} is a {type(argument).__name__}, which is not hashable")
        return is_array


class JaxFunction(_CapturedFunction):
    """A torch function that takes and returns JAX arrays: `jax_fn(*args, rng=None, **kwargs)`.

    The torch function gets arguments that are no arrays (numbers, strings, None) unchanged. Declare them as static arguments of `jax.jit`.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(getattr(function, "__name__", type(function).__name__), StateChangeDetector({"function": function}))
        self._function = function

    def __call__(self, *args: Any, rng: Any = None, **kwargs: Any) -> Any:
        """Calls the function with arrays.

        Args:
            rng: A key of `jax.random`, if the function draws random numbers.

        Raises:
            ArgumentError: An invalid argument, or a missing key.
            CaptureError: The function cannot be captured.
            UnsupportedOp: An op has no lowering.
        """

        def run(_: Sequence[torch.Tensor], torch_args: tuple[Any, ...], torch_kwargs: dict[str, Any]) -> tuple[Any, list[torch.Tensor]]:
            return self._function(*torch_args, **torch_kwargs), []

        return self._evaluate(run, {}, args, kwargs, rng)[0]


class JaxModule(_CapturedFunction):
    """A torch module as a pure function of its parameters: `jax_fn(params, *args, rng=None, buffers=None, **kwargs)`.

    The function has the training or evaluation mode that the module had at conversion. After a later `module.eval()` or `.train()`, a call
    raises CaptureError. If other state that the module reads has changed, the next call runs the module's Python code again. Neither holds
    for a program that `jax.jit` has compiled already: it does not change.

    Attributes:
        initial: The module's parameters at conversion, by name.
        buffers: The module's buffers at conversion, by name; the default of a call's `buffers`.
    """

    def __init__(self, module: nn.Module, method: Any, dtype: torch.dtype | None, share: bool) -> None:
        self._tensors = dict((*module.named_parameters(), *module.named_buffers()))
        super().__init__(type(module).__name__, StateChangeDetector({"module": module, "method": method}, self._tensors.values()))
        self._forward_module = _ForwardModule(module, method)
        self._modes = _modes(module)
        self._parameters = [name for name, _ in module.named_parameters()]
        self._buffers = [name for name, _ in module.named_buffers()]
        self._dtypes: dict[str, torch.dtype] = {}
        self._device = next(iter(self._tensors.values())).device if self._tensors else torch.device("cpu")
        self.initial: dict[str, Array] = {}
        self.buffers: dict[str, Array] = {}
        for name, tensor in self._tensors.items():
            check_tensor(tensor, name)
            if private.has_hooks(tensor):
                raise CaptureError(
                    f"{name} has a hook (register_hook), which jax.grad does not call",
                    hint="remove the hook, and change the gradient that jax.grad returns",
                )
            value = tensor.detach()
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            self._dtypes[name] = value.dtype
            (self.initial if name in self._parameters else self.buffers)[name] = _array(name, value, share)

    def __call__(
        self, params: Mapping[str, Any], /, *args: Any, rng: Any = None, buffers: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """Calls the module with arrays.

        Args:
            params: The module's parameters by name.
            rng: A key of `jax.random`, if the module draws random numbers.
            buffers: The values of the module's buffers by name. If given, the result is a pair of the module's result and the new values of
                all buffers.

        Raises:
            ArgumentError: `params` or `buffers` do not match the module's, a key is missing, or the module changes a buffer and no buffers
                were given.
            CaptureError: The module's control flow depends on a tensor's values, or its mode has changed.
            UnsupportedOp: An op has no lowering.
        """
        self._check_modes()
        buffer_values = self.buffers if buffers is None else buffers
        values = {**self._checked(params, self._parameters, "params"), **self._checked(buffer_values, self._buffers, "buffers")}
        narrow = not jax.config.jax_enable_x64
        state = {name: (value, self._operand(name, value, narrow)) for name, value in values.items()}

        def run(
            tensors: Sequence[torch.Tensor], torch_args: tuple[Any, ...], torch_kwargs: dict[str, Any]
        ) -> tuple[Any, list[torch.Tensor]]:
            self._check_modes()
            names = (f"inner.{name}" for name in (*self._parameters, *self._buffers))
            tensors_by_name = dict(zip(names, tensors, strict=True))
            buffers = [f"inner.{name}" for name in self._buffers]
            tensors_by_name.update({name: tensors_by_name[name].clone() for name in buffers})
            with _refuse_kept_tensors(self._forward_module.inner):
                result = torch.func.functional_call(self._forward_module, tensors_by_name, torch_args, torch_kwargs)
            return result, [tensors_by_name[name] for name in buffers]

        result, new_buffers, call = self._evaluate(run, state, args, kwargs, rng)
        if buffers is not None:
            return result, dict(zip(self._buffers, new_buffers, strict=True))
        first = len(call.copied_operands) - len(self._buffers)
        changed = [name for name, source in zip(self._buffers, call.copied_operands[first:], strict=True) if source is None]
        if changed:
            raise ArgumentError(
                f"{self.__name__} changes its buffers ({', '.join(changed[:5])}), and was called without buffers",
                hint="write out, buffers = jax_fn(params, ..., buffers=jax_fn.buffers), or convert the module in eval mode",
            )
        return result

    def _checked(self, arrays: Any, names: Sequence[str], role: str) -> dict[str, Any]:
        """Returns parameters or buffers in the module's order. Raises ArgumentError if names or shapes do not match the module's."""
        if not isinstance(arrays, Mapping):
            raise ArgumentError(f"{role} of {self.__name__} are a {type(arrays).__name__}", hint="pass a dict of arrays by name")
        missing = [name for name in names if name not in arrays]
        unknown = [str(name) for name in arrays if name not in names]
        if missing or unknown:
            parts = [
                f"lack {', '.join(missing[:5])}" if missing else "",
                f"have {', '.join(unknown[:5])}, which it does not have" if unknown else "",
            ]
            raise ArgumentError(
                f"{role} of {self.__name__} {' and '.join(filter(None, parts))}", hint=f"use the names of the {role} that to_jax returned"
            )
        for name in names:
            shape, value = tuple(self._tensors[name].shape), arrays[name]
            if not isinstance(value, (Array, np.ndarray)) or tuple(value.shape) != shape:
                description = f"of shape {list(value.shape)}" if isinstance(value, (Array, np.ndarray)) else f"a {type(value).__name__}"
                raise ArgumentError(
                    f"{role}[{name!r}] of {self.__name__} is {description}, and the module needs shape {list(shape)}",
                    hint=f"pass an array of the same shape as in the {role} that to_jax returned",
                )
        return {name: arrays[name] for name in names}

    def _operand(self, name: str, value: Any, narrow: bool) -> GraphOperand:
        """Returns the operand of the graph for a parameter or buffer.

        The operand has the dtype of the array. If the array has the dtype to which 32-bit JAX narrows the module's dtype (int32 for int64),
        the operand has the module's dtype.

        Args:
            name: The name of the parameter or buffer.
            value: The array that was passed for it.
            narrow: True if JAX's 64-bit types are off.
        """
        module_dtype = dtypes.to_jax(self._dtypes[name])
        array_dtype = np.dtype(value.dtype)
        dtype = self._dtypes[name] if array_dtype in (module_dtype, narrowed(module_dtype)) else _argument_dtype(array_dtype, narrow)
        if (dtypes.is_inexact(array_dtype), dtypes.is_complex(array_dtype)) != (
            dtypes.is_inexact(module_dtype),
            self._dtypes[name].is_complex,
        ):
            raise ArgumentError(
                f"{name} of {self.__name__} has the dtype {array_dtype}, and the module needs {module_dtype}",
                hint=f"convert it: {name}.astype({module_dtype}); to_jax(module, dtype=...) chooses another floating-point dtype",
            )
        tensor = self._tensors[name]
        return GraphOperand(
            tuple(value.shape), dtype, isinstance(tensor, nn.Parameter) and tensor.requires_grad and dtype.is_floating_point
        )

    def _check_modes(self) -> None:
        """Raises CaptureError if the training mode of the module or a submodule has changed since the conversion."""
        for (name, before), (_, now) in zip(self._modes, _modes(self._forward_module.inner), strict=True):
            if before != now:
                was, is_now = ("train" if mode else "eval" for mode in (before, now))
                raise CaptureError(
                    f"{name or type(self._forward_module.inner).__name__} was in {was} mode when to_jax converted it, "
                    f"and is in {is_now} mode now",
                    hint="convert it again with to_jax, or set the earlier mode",
                )


class _ForwardModule(nn.Module):
    """A module whose `forward` is a call of an inner module, or of a method of the inner module."""

    def __init__(self, inner: nn.Module, method: Any) -> None:
        super().__init__()
        self.inner = inner
        self.training = inner.training
        self._method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (self._method or self.inner)(*args, **kwargs)


@contextlib.contextmanager
def _refuse_kept_tensors(module: nn.Module) -> Iterator[None]:
    """Refuses code in the context that stores a tensor in an attribute of the module: the trace's tensors are invalid after the trace.

    Raises:
        CaptureError: At the end of the context, the module has kept a tensor. The module's attributes have been restored.
    """
    before = [(name, inner, dict(vars(inner)), _containers(inner)) for name, inner in module.named_modules()]
    errors = []
    try:
        yield
    finally:
        for name, inner, attributes, containers in before:
            for attribute, value in list(vars(inner).items()):
                if attributes.get(attribute) is not value and _tensors_in(value):
                    errors.append(f"{name or type(module).__name__} keeps a tensor as its attribute {attribute}")
                    if attribute in attributes:
                        vars(inner)[attribute] = attributes[attribute]
                    else:
                        del vars(inner)[attribute]
            for attribute, copied in containers.items():
                container = attributes[attribute]
                if _tensors_in(container) - _tensors_in(copied):
                    errors.append(f"{name or type(module).__name__} keeps a tensor in its attribute {attribute}")
                    container.clear()
                    (container.extend if isinstance(container, list) else container.update)(copied)
    if errors:
        raise CaptureError(
            f"{errors[0]}, and a JAX function has no state",
            hint="return it, or register it as a buffer and write to that; "
            "if it is a cache that is filled once, fill it before: call the module under torch.no_grad()",
        )


def _containers(module: nn.Module) -> dict[str, Any]:
    """Returns shallow copies of the dicts, lists and sets among a module's attributes, except attributes that every module has."""
    default_attributes = vars(nn.Module())
    return {
        name: copy.copy(value)
        for name, value in vars(module).items()
        if name not in default_attributes and isinstance(value, (dict, list, set))
    }


def _tensors_in(value: Any) -> set[int]:
    """Returns the ids of the tensors among a value's leaves."""
    leaves = list(value) if isinstance(value, set) else torch.utils._pytree.tree_leaves(value)
    return {id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)}


def _modes(module: nn.Module) -> list[tuple[str, bool]]:
    """Returns the names of a module and its submodules, each with True for training mode and False for evaluation mode."""
    return [(name, inner.training) for name, inner in module.named_modules()]


def _dtype(dtype: Any) -> torch.dtype | None:
    """Converts the option `dtype` of `to_jax`, a dtype of torch, JAX or NumPy, to a torch dtype. None stays None.

    Raises:
        OptionError: The option is no floating-point dtype.
    """
    if dtype is None or isinstance(dtype, torch.dtype):
        torch_dtype = dtype
    else:
        try:
            torch_dtype = dtypes.to_torch(jnp.dtype(dtype))
        except (KeyError, TypeError):
            raise OptionError(f"option dtype: {dtype!r} is not a dtype", hint="give for example jnp.bfloat16") from None
    if torch_dtype is not None and not torch_dtype.is_floating_point:
        raise OptionError(f"option dtype: {dtype} is not a floating-point dtype", hint="give for example jnp.bfloat16")
    return torch_dtype


def _argument_dtype(dtype: Any, narrow: bool) -> torch.dtype:
    """Returns the dtype of the tensor that stands for an array. In 32-bit JAX, int32 becomes int64, which torch requires for indices."""
    try:
        torch_dtype = dtypes.to_torch(np.dtype(dtype))
    except (KeyError, TypeError):
        raise ArgumentError(f"an array among the arguments has the dtype {dtype}, which has no counterpart in torch") from None
    return torch.int64 if narrow and torch_dtype == torch.int32 else torch_dtype


def _argument(value: Any, narrow: bool) -> GraphOperand:
    dtype = _argument_dtype(value.dtype, narrow)
    return GraphOperand(tuple(value.shape), dtype, dtype.is_floating_point or dtype.is_complex)


def _array(name: str, tensor: torch.Tensor, share: bool) -> Array:
    """Returns a parameter or buffer as an array, with a dtype that the user's JAX can hold.

    Args:
        name: The name of the parameter or buffer, for errors.
        tensor: Its value.
        share: True if the array must use the tensor's memory. It is copied all the same if 32-bit JAX narrows its dtype.
    """
    wide = dtypes.to_jax(tensor.dtype)
    dtype = wide if jax.config.jax_enable_x64 else narrowed(wide)
    if dtype != wide and dtypes.is_inexact(wide):
        narrow = "convert it to complex64" if dtypes.is_complex(wide) else "give to_jax a dtype, such as jnp.float32"
        raise OptionError(
            f"{name} is {wide}, and JAX's 64-bit types are off here",
            hint=f'{narrow}, or call jax.config.update("jax_enable_x64", True) when the program starts',
        )
    if share and dtype == wide:
        if tensor.device.type != "cpu":
            raise OptionError(f"option share: {name} is on {tensor.device}", hint="leave share out: only CPU memory can be shared")
        try:
            return jax.dlpack.from_dlpack(tensor, copy=False)
        except Exception as error:
            raise OptionError(
                f"option share: JAX cannot use the memory of {name}: {error}", hint="leave share out: the parameters are copied then"
            ) from None
    value = to_numpy(tensor)
    narrowed_value = value.astype(dtype)
    if dtype != wide and not np.array_equal(narrowed_value, value):
        raise OptionError(f"{name} has numbers that {dtype} cannot represent", hint='call jax.config.update("jax_enable_x64", True) first')
    return jnp.asarray(narrowed_value)


def _key_data(rng: Any, name: str, location: str) -> Array:
    """Returns the data of a threefry key for one call, as uint32[2], derived from the user's key.

    Args:
        rng: The user's key, of any of JAX's generators, or None.
        name: The function's name, for errors.
        location: The user's line that draws random numbers, for errors.

    Raises:
        ArgumentError: `rng` is None or not a key.
    """
    if rng is None:
        raise ArgumentError(
            f"{name} draws random numbers, and was called without a key", where=location, hint="call it with rng=jax.random.key(0)"
        )
    try:
        return jax.random.bits(rng, (2,), np.uint32)
    except TypeError as error:
        raise ArgumentError(f"rng of {name} is not a key: {error}", hint="pass a key of jax.random, such as jax.random.key(0)") from None


class _TensorPlaceholder:
    """The type of `_TENSOR`, the placeholder of a tensor in the structure of a result."""


_TENSOR = _TensorPlaceholder()


def _flatten_result(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Returns a result with `_TENSOR` in place of its tensors, in dicts, lists and tuples. Appends the tensors to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TENSOR
    if isinstance(value, Mapping):  # JAX gets a plain dict in place of transformers' output classes
        return {name: _flatten_result(item, tensors) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_flatten_result(item, tensors) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items) if isinstance(value, tuple) else items
    if value is None or isinstance(value, (bool, int, float, complex, str)):
        return value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise CaptureError(
            "the function returns a Python number that is known only when its program runs, such as a loop counter",
            hint="use a tensor: carry torch.tensor(0) through the loop instead of 0",
        )
    raise CaptureError(
        f"the function returns a {type(value).__name__}, which JAX does not support",
        hint="return tensors in dicts, lists and tuples; for models of transformers, use_cache=False leaves caches out",
    )


def _unflatten_result(value: Any, arrays: Any) -> Any:
    """Replaces each `_TENSOR` in a result by the next of the arrays."""
    if value is _TENSOR:
        return next(arrays)
    if isinstance(value, dict):
        return {name: _unflatten_result(item, arrays) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        items = [_unflatten_result(item, arrays) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
