"""Finds arguments that torch's own kernels refuse, although a lowering would accept them.

Examples are `"bmm" not implemented for 'Bool'`, "expected m1 and m2 to have the same dtype", "Dimension out of range", the maximum of no
elements, and a number out of the dtype's range. PyTorch's fake tensors seldom perform these checks, and XLA computes with every dtype.

So the kernel itself is tried before the graph is compiled, once for each op and set of arguments. A trial calls the kernel with the
arguments of the graph, but with small tensors of zeros or ones in place of the graph's tensors. A trial takes microseconds. If the kernel
refuses the arguments, the program calls the kernel, as for an op without a lowering, and the kernel raises the exception of eager mode.

A trial that wrongly refuses arguments costs only speed. If a trial wrongly accepts them, the program computes a result where eager mode
raises.

The first trials use tensors of a few elements, and only exceptions about dtypes are refusals. If they find no refusal, tensors with few
elements are tried with their own shapes, and every exception is a refusal; larger tensors are tried with sizes of at most 2, and only
exceptions about numbers and dimensions that do not depend on sizes are refusals.

Only ops that the user's program or autograd called are tried. The ops of a decomposition need no kernel for their dtypes.
"""

from __future__ import annotations

import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from .. import forks
from ..runtime import private
from . import dtypes

# Matches messages about dtypes. Other messages are about shapes or values, which differ between the trial and the program.
_ABOUT_DTYPES = re.compile(
    r"not implemented for|representable range|type|floating|complex|integral|integer|[Bb]ool|\b(Half|Long|Float|Double|Int)\b"
)

# Matches messages about numbers and dimensions that do not depend on sizes.
_ABOUT_NUMBERS = re.compile(
    "[Dd]imension out of range|[Dd]im .*repeated|non-zero size|without overflow|representable range|[Ee]xpected reduction dim"
    "|support (negative|non-positive)|alpha"
)

# Tensors with at most this many elements in total keep their shapes in a trial.
_MAX_ELEMENTS_OF_OWN_SHAPES = 1024
# The same limit for trials after the failure of a lowering. Such trials are rare.
_MAX_ELEMENTS_AFTER_FAILURE = 2**24

# Matches the names of ops that are not tried: ops that only ATen's own code calls, whose kernels may not check their arguments; ops whose
# kernels refuse sizes of one; and histc, whose fake kernel checks the dtype by device (CUDA's kernel accepts integers).
_UNTRIED = re.compile(
    "backward|flash|efficient|cudnn|miopen|mkldnn|fused|foreach|nested|jagged|embedding_bag|rnn|lstm|gru|int_mm|int4|int8|mixed_dtypes"
    "|segment|sparse|quant|scaled|grouped|ctc|assert|check|functional_sym|cslt|histc|empty|as_strided|resize|set_|item|equal|unsafe_view"
)

# By name of an argument that determines sizes, or must agree with sizes: its value in trials with small tensors. (The value of output_size
# differs from the sizes of the tensors, because a kernel that resizes only copies a tensor that already has the requested size.)
_TRIAL_VALUES = dict.fromkeys(
    ["kernel_size", "stride", "dilation", "groups", "group", "num_samples", "bins", "bin_ct", "upscale_factor"], 1
)
_TRIAL_VALUES |= dict.fromkeys(["padding", "output_padding", "low"], 0) | {"pad": 1, "high": 1, "output_size": 2}

# The refusals that `refusal` has found, by op and properties of the arguments; "" for accepted arguments.
_refusals: dict[Any, str] = {}


def refusal_of_node(node: Node) -> str:
    """Returns the message with which torch's kernel refuses a node's arguments; "" if it accepts them, or cannot be tried."""
    op = node.target
    if not isinstance(op, OpOverload) or str(node.meta.get("original_aten") or op) != str(op):  # by name: graphs hold copies of overloads
        return ""

    def value(argument: Any) -> Any:
        return torch.fx.node.map_arg(argument, lambda source: source.meta.get("val"))

    return refusal(op, value(node.args), value(node.kwargs))


def refusal(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Returns the message with which torch's kernel refuses these arguments; "" if it accepts them, or cannot be tried.

    Args:
        args, kwargs: The op's arguments, with fake tensors.
    """
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not _can_be_tried(op, tensors, args):
        return ""
    if not all(tensor.is_cpu or tensor.device.type == "jax" for tensor in tensors):
        # The trial runs on the CPU. Kernels of other devices accept other dtypes, but refuse the same numbers.
        numbers, name = torch.utils._pytree.tree_leaves((args, kwargs)), op._schema.name.removeprefix("aten::")
        is_tried = may_refuse_numbers(name, numbers, {tensor.dtype for tensor in tensors})
        return refusal_of_numbers(op, args, kwargs) if is_tried else ""
    is_small = bool(tensors) and _is_small(tensors, _MAX_ELEMENTS_OF_OWN_SHAPES) and not _is_decided_by_values(op, args, kwargs)
    key = (op, _key(op, args, kwargs, is_small))
    if (message := _refusals.get(key)) is None:
        message = _try_kernel(op, args, kwargs, _TRIALS[op._schema.name in _WARN_FOR_ONE_ELEMENT :])
        # Not in a forked child: larger matrix products would wait for threads that the child does not have.
        if not message and op._schema.name not in _WARN_FOR_ONE_ELEMENT and not forks.has_lost_xla():
            message = (
                _try_kernel(op, args, kwargs, _OWN_SHAPES, None) if is_small else _try_kernel(op, args, kwargs, _SMALLER, _ABOUT_NUMBERS)
            )
        _refusals[key] = message
    return message


def _is_decided_by_values(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """True if a kernel may accept or refuse arguments because of symbolic sizes, masks or the values of tensors.

    A trial cannot decide this, because it replaces these values.
    """
    tags = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
    values = torch.SymInt, torch.SymFloat, torch.SymBool
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return any(tag in op.tags for tag in tags) or any(
        isinstance(leaf, values) or (isinstance(leaf, torch.Tensor) and leaf.dtype == torch.bool) for leaf in leaves
    )


def refusal_after_failure(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Like `refusal`, for the arguments of a lowering that has failed.

    The trial keeps the shapes. Arguments with more than _MAX_ELEMENTS_AFTER_FAILURE elements are not tried.
    """
    if not isinstance(op, OpOverload):
        return ""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if not _can_be_tried(op, tensors, args) or not _is_small(tensors, _MAX_ELEMENTS_AFTER_FAILURE):
        return ""
    return _try_kernel(op, args, kwargs, _OWN_SHAPES, None)


def refusal_of_numbers(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Like `refusal`, only for the values of numbers, such as 300 for an int8."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    # Kernels often fill a tensor of one element without checking the number, so the trial with size 1 is left out.
    return _try_kernel(op, args, kwargs, _TRIALS[1:]) if _can_be_tried(op, tensors, args) else ""


def may_refuse_numbers(name: str, numbers: Iterable[Any], tensor_dtypes: Iterable[torch.dtype]) -> bool:
    """True if torch's kernel might refuse numbers because of their values.

    Args:
        name: The op's name, without namespace.
        numbers: The numbers among its arguments.
        tensor_dtypes: The dtypes of its tensors.
    """
    tensor_dtypes = list(tensor_dtypes)
    limits: tuple[float, float] | None = None
    for value in numbers:
        kind = type(value)
        if (kind is int and 0 <= value <= 127) or (kind is not int and kind is not float):
            continue
        if not math.isfinite(value):
            if any(not dtype.is_floating_point and not _is_unlimited(dtype) for dtype in tensor_dtypes):
                return True
            continue
        if limits is None:
            infos = [
                torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype) for dtype in tensor_dtypes if not _is_unlimited(dtype)
            ]
            limits = max((info.min for info in infos), default=-math.inf), min((info.max for info in infos), default=math.inf)
        if not limits[0] <= value <= limits[1] or (value < 0 and kind is int and name == "pow"):
            return True
    return False


def _is_unlimited(dtype: torch.dtype) -> bool:
    """True if kernels accept every number for this dtype."""
    return dtype.is_complex or dtype in (torch.bool, torch.float64)


def is_untried(op: OpOverload) -> bool:
    """True for an op that is not tried, because its kernel may not check its arguments, or refuses small sizes."""
    return _UNTRIED.search(op._schema.name) is not None


def _can_be_tried(op: OpOverload, tensors: Sequence[torch.Tensor], args: Sequence[Any]) -> bool:
    """True if a trial of the op has no side effect, and takes little time and memory.

    Args:
        tensors: The tensors among the op's arguments.
        args: The op's positional arguments.
    """
    if op.namespace != "aten" or op.is_view or op._schema.is_mutable or is_untried(op):
        return False
    if torch.Tag.nondeterministic_seeded in op.tags:
        if with_generator(op) is None:
            return False  # the trial would draw from torch's own generator
    elif not tensors:
        name = op._schema.name  # for other ops without tensors, the numbers determine sizes
        return name in _FILLED or (name in _COUNTED and all(type(n) is not int or n <= _MAX_ELEMENTS_OF_OWN_SHAPES for n in args))
    return all(tensor.layout == torch.strided and dtypes.is_supported(tensor.dtype) for tensor in tensors)


def with_generator(op: OpOverload) -> OpOverload | None:
    """Returns the overload of an op that takes the same arguments and a generator; None if there is none."""
    arguments = [_name_and_type(argument) for argument in op._schema.arguments if argument.name != "generator"]
    for name in (op._overloadname, *op.overloadpacket.overloads()):
        overload = getattr(op.overloadpacket, name)
        overload_arguments = [_name_and_type(argument) for argument in overload._schema.arguments if argument.name != "generator"]
        if overload_arguments == arguments and len(overload_arguments) < len(overload._schema.arguments):
            return overload
    return None


def _name_and_type(argument: Any) -> tuple[str, str]:
    return argument.name, str(argument.real_type)


def _is_small(tensors: Sequence[torch.Tensor], limit: int) -> bool:
    """True if the tensors have static shapes and at most `limit` elements in total."""
    return all(type(size) is int for tensor in tensors for size in tensor.shape) and sum(tensor.numel() for tensor in tensors) <= limit


def _key(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], is_small: bool) -> Any:
    """Returns a hashable key of the arguments' properties that determine the result of a trial.

    Args:
        is_small: True if the properties include shapes and sizes.
    """
    schema = {argument.name: argument for argument in op._schema.arguments}

    def key(argument: Any, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # For a larger tensor, only its empty dimensions matter.
            return value.dtype, tuple(value.shape) if is_small else tuple(type(size) is int and size == 0 for size in value.shape)
        if isinstance(value, (list, tuple)):
            return tuple(key(argument, item) for item in value)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return type(value)
        # A number that a trial replaces does not matter.
        return type(value) if type(value) is int and not is_small and _is_replaced(argument) else repr(value)

    positional = tuple(key(argument, value) for argument, value in zip(schema.values(), args, strict=False))
    return positional, tuple((name, key(schema[name], value)) for name, value in kwargs.items())


# Ops that create a tensor of given sizes and fill it with a number; and ops that create a given count of numbers.
_FILLED = frozenset(["aten::full", "aten::scalar_tensor"])
_COUNTED = frozenset(["aten::linspace", "aten::logspace"])

# Each trial is (size of all dimensions of all tensors, value of all elements). A negative size -n limits each size to n. Several trials are
# needed, because some kernels (linalg_cross) refuse sizes other than three before they check dtypes, some (lu_solve) refuse zeros, and some
# (grid_sampler) need the size of the last dimension.
_TRIALS = ((1, 0), (3, 0), (-4, 0), (3, 1))
_OWN_SHAPES = ((-sys.maxsize, 0), (-sys.maxsize, 1))
_SMALLER = ((-2, 0),)


# Ops that warn about degrees of freedom if their input has one element. The trial with size 1 is left out for them, and so are the trials
# after `_TRIALS`.
_WARN_FOR_ONE_ELEMENT = frozenset(["aten::std", "aten::var", "aten::std_mean", "aten::var_mean"])


def _try_kernel(
    op: OpOverload,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    trials: Sequence[tuple[int, int]],
    pattern: re.Pattern[str] | None = _ABOUT_DTYPES,
) -> str:
    """Runs trials and returns the message of a refusal, or "".

    Args:
        trials: (size, content) pairs for `_trial_argument`. The trials run until one succeeds: then the kernel accepts the arguments.
        pattern: The first exception whose message matches this pattern is the refusal. If None, all trials must fail, and the last
            exception is the refusal.
    """
    message = ""
    schema = {argument.name: argument for argument in op._schema.arguments}
    with _disable_current_modes(), private.below_autograd(), torch.no_grad():
        for size, content in trials:
            bound = [(argument, value) for argument, value in zip(op._schema.arguments, args, strict=False) if argument.name != "generator"]
            trial_args = [_trial_argument(argument, value, size, content) for argument, value in bound]
            trial_kwargs = {name: _trial_argument(schema[name], value, size, content) for name, value in kwargs.items()}
            try:
                if torch.Tag.nondeterministic_seeded in op.tags and (overload := with_generator(op)) is not None:
                    overload(*trial_args, **trial_kwargs | {"generator": torch.Generator()})
                else:
                    op(*trial_args, **trial_kwargs)
            except torch.linalg.LinAlgError:  # caused by the trial's values
                return ""
            except Exception as error:
                message = str(error).partition("\n")[0] or type(error).__name__
                # This machine has no such kernel, or a library (MKL's FFT) does not support empty batches.
                if pattern is None and (isinstance(error, NotImplementedError) or message.startswith("MKL FFT error")):
                    return ""
                if pattern is not None and pattern.search(message):
                    return message
            else:
                return ""
    return "" if pattern is not None else message


def _trial_argument(argument: Any, value: Any, size: int, content: int) -> Any:
    """Returns an argument of a trial.

    Args:
        argument: The schema's argument.
        value: The argument's value in the graph.
        size: The size of all dimensions of tensors; if negative, each size is at most -size.
        content: The value of all elements of tensors.
    """
    if isinstance(value, torch.Tensor):
        sizes = [size if size > 0 or not isinstance(extent, int) else min(extent, -size) for extent in value.shape]
        return torch.full([abs(extent) for extent in sizes], content, dtype=value.dtype)
    if isinstance(value, (list, tuple)):
        return [_trial_argument(argument, item, size, content) for item in value]
    if isinstance(value, torch.device):
        return torch.device("cpu")
    if isinstance(value, torch.SymFloat):
        return 1.0
    if isinstance(value, torch.SymInt) or (type(value) is int and size != -sys.maxsize and _is_replaced(argument)):
        return _TRIAL_VALUES.get(argument.name, abs(size))
    return value


def _is_replaced(argument: Any) -> bool:
    """True if a trial with small tensors replaces numbers of this argument."""
    return argument.name in _TRIAL_VALUES or _is_size(argument)


def _is_size(argument: Any) -> bool:
    """True if the argument is a SymInt or a list of them: sizes, or numbers that sizes depend on."""
    kind = argument.real_type
    while (inner := getattr(kind, "getElementType", None)) is not None:
        kind = inner()
    return isinstance(kind, torch.SymIntType)


_thread = threading.local()


def unless_refused(op: OpOverload, decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a decomposition so that it does not decompose a call that the op's kernel refuses.

    Ops that the decomposition itself calls are decomposed without a check.
    """

    def decompose(*args: Any, **kwargs: Any) -> Any:
        if getattr(_thread, "is_decomposing", False):
            return decomposition(*args, **kwargs)
        if refusal(op, args, kwargs):
            return NotImplemented
        _thread.is_decomposing = True
        try:
            return decomposition(*args, **kwargs)
        finally:
            _thread.is_decomposing = False

    return decompose
