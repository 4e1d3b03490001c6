"""The insides of FSDP2 (`torch.distributed.fsdp.fully_shard`), all of which are private to torch: which parameters go together, how each of
them is cut, and the hooks that gather and free them.

A *state* is torch's of one `fully_shard` call, a *group* of those of its parameters that lie on one mesh, a *parameter* one of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from . import private

State = Any
Group = Any
Parameter = Any

log = logging.getLogger("dynaxla")

# All that this module names in a state, a group and a parameter that every release has set by the time of a first step.
_IN_STATE = (
    "_fsdp_param_groups", "_is_root", "_modules", "_lazy_init", "_pre_forward_hook_handle", "_post_forward_hook_handle", "_pre_forward",
    "_post_forward", "_device", "_cast_forward_inputs", "_cast_output_dtype",
)  # fmt: skip
_IN_GROUP = (
    "fsdp_params", "_to_sharded", "mesh_info", "_all_reduce_hook", "_all_gather_comm", "_reduce_scatter_comm", "offload_policy", "unshard",
    "wait_for_unshard", "reshard", "post_backward", "post_forward_mesh_info", "_reduce_scatter_process_group",
    "_partial_reduce_output", "gradient_divide_factor", "force_sum_reduction_for_comms", "device",
)  # fmt: skip
_IN_PARAMETER = (
    "sharded_param", "sharded_size", "padded_sharded_param_size", "_orig_size", "fsdp_placement", "param_dtype", "orig_dtype",
    "reduce_dtype", "_unsharded_dtensor_spec", "_setattr_on_modules", "unsharded_param", "unsharded_accumulated_grad",
    "_get_grad_inner_tensor", "to_sharded_dtensor",
)  # fmt: skip
# More names, for torch 2.15 (see `_waits_in_whole`).
_IN_GROUP_WITH_WHOLE = ("_post_backward_pending", "_partial_reduce_output_layout")
_IN_PARAMETER_WITH_WHOLE = ("unsharded_grad_dtype", "sharded_grad_dtype")
_FUNCTIONS = (
    "torch.distributed.fsdp.CPUOffloadPolicy",
    "torch.distributed.fsdp._common_utils.collect_grad_tensors",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultReduceScatter",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives._get_gradient_divide_factors",
    "torch.distributed.utils._to_kwargs",
)
# The ones that are assigned to.
_WRITTEN = (
    "_pre_forward", "_post_forward", "unshard", "wait_for_unshard", "reshard", "post_backward", "_partial_reduce_output",
    "_partial_reduce_output_layout", "_post_backward_pending",
)  # fmt: skip
_NOTHING = object()


def missing_in(modules: Iterable[Any]) -> str:
    """The first name that this module needs and this torch's FSDP2 lacks, "" if there is none. Logged once."""
    modules = list(modules)
    return _missing_function() or next(filter(None, map(_missing_in_module, modules)), "") if modules else ""


@functools.cache
def _missing_function() -> str:
    return _reported(next((name for name in _FUNCTIONS if private._find(name) is None), ""))


def _missing_in_module(module: Any) -> str:
    if not hasattr(module, "_get_fsdp_state"):
        return _reported("_get_fsdp_state")
    state = module._get_fsdp_state()
    if missing := _lacks(state, _IN_STATE):
        return _reported(missing)
    for group in groups_of(state):
        if missing := _lacks(group, _IN_GROUP):
            return _reported(missing)
        for parameter in group.fsdp_params[:1]:  # all are of one class
            if missing := _lacks(parameter, _IN_PARAMETER):
                return _reported(missing)
            missing = _lacks(group, _IN_GROUP_WITH_WHOLE) or _lacks(parameter, _IN_PARAMETER_WITH_WHOLE)
            if missing and _waits_in_whole(parameter):
                return _reported(missing)
    return ""


def _lacks(item: Any, names: Sequence[str]) -> str:
    """The first of these names that neither an object nor its class has, "" if there is none."""
    return next((f"{type(item).__name__}.{name}" for name in names if not _has(item, name)), "")


def _has(item: Any, name: str) -> bool:
    """True for attributes that a class only declares, too: some are set by a first forward pass, before which some properties raise."""
    found = inspect.getattr_static(item, name, _NOTHING)
    if name in _WRITTEN and isinstance(found, property):
        return found.fset is not None
    return found is not _NOTHING or any(name in vars(kind).get("__annotations__", ()) for kind in type(item).__mro__)


def _waits_in_whole(parameter: Parameter) -> bool:
    """True if gradients wait in `.grad` of torch's whole parameter (torch 2.15); in earlier releases an attribute beside it holds them."""
    return isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


@functools.cache
def _reported(missing: str) -> str:
    if missing:
        log.warning("torch %s has no %s in FSDP2: steps leave the gathering of parameters to torch's hooks", torch.__version__, missing)
    return missing


def modules_among(objects: Iterable[Any]) -> list[torch.nn.Module]:
    """The modules that `fully_shard` has been called with, each once."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if kind is None else list({id(item): item for item in objects if isinstance(item, kind)}.values())


def states_of(modules: Iterable[Any]) -> list[State]:
    """Their states, each once."""
    return list({id(state): state for state in (module._get_fsdp_state() for module in modules)}.values())


def groups_of(state: State) -> Sequence[Group]:
    """Its groups, in the order in which they are gathered."""
    found: Sequence[Group] = state._fsdp_param_groups
    return found


def prepare(modules: Sequence[Any]) -> None:
    """Have torch do what it does before a first forward pass, and free the parameters that an earlier pass has left gathered."""
    if missing_in(modules):
        return
    states = states_of(modules)
    if any(state._is_root is None for state in states):
        inside = {id(part) for module in modules for part in module.modules() if part is not module}
        for state in states_of(module for module in modules if id(module) not in inside):
            if state._is_root is None and len(state._modules) == 1:
                state._lazy_init()
    for state in states:
        for group in groups_of(state):
            if _lacks_wholes(group) and not why_not_gathered(state):
                group.unshard()  # once; a collective, to which all processes come with their first step
                group.wait_for_unshard()
            free(group)


def _lacks_wholes(group: Group) -> bool:
    """True if gradients are to wait in whole parameters of torch's that torch has not made: it does as it first gathers the group."""
    return any(_waits_in_whole(parameter) and not hasattr(parameter, "unsharded_param") for parameter in group.fsdp_params)


def free(group: Group) -> None:
    """Its modules have their own parts of parameters, as between two steps; gradients that wait for more of them stand where torch looks
    first."""
    for parameter in group.fsdp_params:
        whole = getattr(parameter, "unsharded_param", None)
        if not _waits_in_whole(parameter) and whole is not None and whole.grad is not None:
            add_waiting(parameter, whole.grad)
            whole.grad = None
    group._to_sharded()  # nothing if they have


def why_not_gathered(state: State) -> str:
    """What a state asks for that functional collectives do not do; "" for nothing."""
    from torch.distributed.fsdp import CPUOffloadPolicy
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    if state._is_root is None:
        return "modules that belong to no single root module"
    for group in groups_of(state):
        reasons = {
            "parameters that are replicated, not sharded": not hasattr(group.mesh_info, "shard_process_group"),
            "dp_mesh_dims": group.mesh_info.is_spmd_mesh,
            "a hook for all-reduces": group._all_reduce_hook is not None,
            "collectives of its own": type(group._all_gather_comm) is not collectives.DefaultAllGather
            or type(group._reduce_scatter_comm) is not collectives.DefaultReduceScatter,
            "parameters that are offloaded": isinstance(group.offload_policy, CPUOffloadPolicy),
            "gradients in a dtype of their own (grad_dtype)": any(
                getattr(parameter, "_has_sharded_grad_dtype_override", False) for parameter in group.fsdp_params
            ),
            "parameters with types of their own (spmd_types)": any(
                getattr(parameter, "is_spmd_types", False) for parameter in group.fsdp_params
            ),
            "tensors that are gathered in a way of their own (fsdp_pre_all_gather)": any(
                hasattr(own_part(parameter), "fsdp_pre_all_gather") for parameter in group.fsdp_params
            ),
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), ""):
            return reason
    return ""


@contextlib.contextmanager
def without_hooks(state: State, pre_forward: Callable[..., Any], post_forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, these run in the places of a state's hooks: (module, args, kwargs) gives what a module is called with, (module, args, output)
    what it gives."""
    handles = state._pre_forward_hook_handle, state._post_forward_hook_handle
    numbers = {handle.id for item in handles for handle in getattr(item, "handles", (item,))}
    replaced: list[tuple[Any, int, Any]] = []
    for module in state._modules:
        for hooks, own in ((module._forward_pre_hooks, pre_forward), (module._forward_hooks, post_forward)):
            for number in numbers & hooks.keys():
                replaced.append((hooks, number, hooks[number]))
                hooks[number] = own
    state._pre_forward, state._post_forward = pre_forward, post_forward  # where a method has been made to gather, too
    try:
        yield
    finally:
        del state._pre_forward, state._post_forward
        for hooks, number, hook in replaced:
            hooks[number] = hook


@contextlib.contextmanager
def without_memory(
    group: Group, gather: Callable[[], object], drop: Callable[[], object], end_backward: Callable[[], object]
) -> Iterator[None]:
    """Inside, these are called where somebody asks for a group's parameters (`module.unshard()`), to let them go, and for the exchange of
    gradients that wait (`module.finalize_backward()` of torch 2.15)."""
    group.unshard, group.wait_for_unshard, group.reshard, group.post_backward = (lambda async_op=False: None), gather, drop, end_backward
    try:
        yield
    finally:
        del group.unshard, group.wait_for_unshard, group.reshard, group.post_backward


def modules_of(state: State) -> Sequence[torch.nn.Module]:
    """Those that the state was made for: all of them together run once, or one."""
    found: Sequence[torch.nn.Module] = state._modules
    return found


def to_device(state: State, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """What a root module is called with, where its parameters are."""
    if state._device.type == "cpu" or not (args or kwargs):
        return args, kwargs
    given, named = torch.distributed.utils._to_kwargs(args, kwargs, state._device, False)
    return given[0], named[0]


def cast_inputs(state: State, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """What a module is called with, as its mixed precision wants it."""
    found: tuple[Any, Any] = state._cast_forward_inputs(args, kwargs)
    return found


def cast_output(state: State, output: Any) -> Any:
    """What a module gives, as its mixed precision wants it."""
    return state._cast_output_dtype(output)


def tensors_with_gradient(output: Any) -> list[torch.Tensor]:
    """The tensors in a module's output that a backward pass begins at."""
    from torch.distributed.fsdp._common_utils import collect_grad_tensors

    return list(collect_grad_tensors(output))


# Of a group.


def is_freed_after_forward(group: Group) -> bool:
    """Whether whole parameters are not kept for the backward pass."""
    return group.post_forward_mesh_info is not None


def shard_group(group: Group) -> Any:
    """The processes that have its parameters in parts."""
    return group.mesh_info.shard_process_group


def reduce_group(group: Group) -> Any:
    """The processes that sum its gradients in parts."""
    return group._reduce_scatter_process_group


def replica_group(group: Group) -> Any | None:
    """The processes that have the same parts; None if no others do."""
    return getattr(group.mesh_info, "replicate_process_group", None)


def in_order_of_sum(group: Group) -> Sequence[Parameter]:
    """Its parameters, in the order in which their gradients are summed: those of one dtype together."""
    dtypes = [dtype_of_gradient(parameter) for parameter in group.fsdp_params]
    return sorted(group.fsdp_params, key=lambda parameter: dtypes.index(dtype_of_gradient(parameter)))


def note_waiting(group: Group, is_waiting: bool) -> None:
    """A backward pass has ended for its parameters. is_waiting: their gradients have not been summed."""
    if getattr(group, "_post_backward_pending", is_waiting) != is_waiting:
        group._post_backward_pending = is_waiting


def has_partial_sum(group: Group, parameter: Parameter) -> bool:
    """True if torch keeps this parameter's place in `partial_sum`, and would sum zeros for a gradient that it lacks."""
    return group._partial_reduce_output is not None and parameter in getattr(group, "_partial_reduce_output_layout", ())


def partial_sum(group: Group, parameters: Sequence[Parameter]) -> torch.Tensor | None:
    """Gradients of these parameters, flat and with padding, that other replicas have yet to add theirs to."""
    found: torch.Tensor | None = group._partial_reduce_output
    layout = getattr(group, "_partial_reduce_output_layout", None)
    if found is None or layout is None or layout == _layout(parameters):
        return found
    sizes = {parameter: parameter.padded_sharded_param_size.numel() for parameter in parameters}
    return torch.cat([found.narrow(0, *layout[item]) if item in layout else found.new_zeros(size) for item, size in sizes.items()])


def keep_partial_sum(group: Group, parameters: Sequence[Parameter], value: torch.Tensor | None) -> None:
    """See `partial_sum`."""
    group._partial_reduce_output = value
    layout = _layout(parameters)
    if value is not None and getattr(group, "_partial_reduce_output_layout", layout) != layout:
        group._partial_reduce_output_layout = layout


def _layout(parameters: Sequence[Parameter]) -> dict[Parameter, tuple[int, int]]:
    """Where each one's gradient begins in a flat sum, and how long it is."""
    found, offset = {}, 0
    for parameter in parameters:
        size = parameter.padded_sharded_param_size.numel()
        found[parameter] = offset, size
        offset += size
    return found


def scaling(group: Group, dtype: torch.dtype) -> tuple[float, float, str, str]:
    """What gradients are divided by before they are summed and after, and by which ops of functional collectives they are summed: in parts,
    and over replicas."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    factor = group.gradient_divide_factor
    before, after, scatter, everywhere = _get_gradient_divide_factors(
        reduce_group(group), replica_group(group), dtype, group.device.type, factor, group.force_sum_reduction_for_comms
    )
    average, total = torch.distributed.ReduceOp.AVG, torch.distributed.ReduceOp.SUM
    if scatter not in (average, total):  # scaled inside of the collective
        before, scatter = factor, total
    scattered, summed = ("avg" if op == average else "sum" for op in (scatter, everywhere))
    return before or 1.0, after or 1.0, scattered, summed


# Of a parameter.


def sharded(parameter: Parameter) -> torch.nn.Parameter:
    """The parameter as optimizers see it."""
    found: torch.nn.Parameter = parameter.sharded_param
    return found


def own_part(parameter: Parameter) -> torch.Tensor:
    """What of it lies on this process, itself."""
    found: torch.Tensor = parameter.sharded_param._local_tensor
    return found


def part_sizes(parameter: Parameter) -> tuple[torch.Size, torch.Size, torch.Size, int]:
    """The sizes of this process's part, of a part with padding (the same on all), of the whole, and the dimension that is cut."""
    return parameter.sharded_size, parameter.padded_sharded_param_size, parameter._orig_size, parameter.fsdp_placement.dim


def dtype_of_use(parameter: Parameter) -> torch.dtype:
    """In which it is gathered and computed with."""
    found: torch.dtype = parameter.param_dtype or parameter.orig_dtype
    return found


def dtype_of_gradient(parameter: Parameter) -> torch.dtype:
    """The dtype of `.grad` of the sharded parameter."""
    found: torch.dtype = parameter.sharded_grad_dtype if _waits_in_whole(parameter) else parameter.orig_dtype
    return found


def dtype_of_waiting(parameter: Parameter) -> torch.dtype | None:
    """The dtype of gradients of the whole until they are summed; None: the one that they are computed in."""
    found: torch.dtype | None = parameter.unsharded_grad_dtype if _waits_in_whole(parameter) else parameter.reduce_dtype
    return found


def mixes_dtypes(parameter: Parameter) -> bool:
    """True if torch sums its gradients together with those of another dtype, in a dtype for both."""
    return _waits_in_whole(parameter)


def wrap_whole(parameter: Parameter, local: torch.Tensor) -> torch.Tensor:
    """What modules compute with: a DTensor where the parameter is one besides (tensor parallelism)."""
    if parameter._unsharded_dtensor_spec is None:
        return local
    spec = parameter._unsharded_dtensor_spec
    if spec.tensor_meta is not None:
        spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return wrap(local, spec)


def wrap(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """A DTensor of this process's part. spec: where it lies, and what the whole is like."""
    from torch.distributed.tensor import DTensor

    found: torch.Tensor = DTensor(local, spec, requires_grad=False)
    return found


def unwrap(tensor: Any) -> tuple[torch.Tensor, Any]:
    """This process's part of a tensor and where it lies; None for the latter if the tensor is no DTensor."""
    return (tensor._local_tensor, tensor._spec) if hasattr(tensor, "_spec") else (tensor, None)


def put(parameter: Parameter, tensor: torch.Tensor) -> None:
    """Have all modules that share the parameter find this in its place."""
    tensor._is_param = True  # what `isinstance(x, torch.nn.Parameter)` goes by
    parameter._setattr_on_modules(tensor)


def take_away(parameter: Parameter) -> None:
    """Have all modules that share the parameter find the sharded one."""
    parameter._setattr_on_modules(parameter.sharded_param)


def waiting(parameter: Parameter) -> torch.Tensor | None:
    """The sum of gradients of earlier backward passes that processes have not exchanged yet, of the whole."""
    found: torch.Tensor | None = parameter.unsharded_accumulated_grad
    return found


def forget_waiting(parameter: Parameter) -> None:
    """See `waiting`."""
    _set_waiting(parameter, None)


def add_waiting(parameter: Parameter, gradient: torch.Tensor) -> None:
    """Add to the gradients that processes have not exchanged yet."""
    before, dtype = waiting(parameter), dtype_of_waiting(parameter)
    gradient = gradient if dtype is None else gradient.to(dtype)
    _set_waiting(parameter, gradient if before is None else before + gradient)


def _set_waiting(parameter: Parameter, gradient: torch.Tensor | None) -> None:
    if _waits_in_whole(parameter):
        parameter.unsharded_param.grad = gradient
    else:
        parameter.unsharded_accumulated_grad = gradient


def gradient_part(parameter: Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """This process's part of a gradient of the whole, laid as the parameter is."""
    found: torch.Tensor = parameter._get_grad_inner_tensor(gradient)
    return found


def add_gradient(parameter: Parameter, part: torch.Tensor) -> None:
    """Add this process's part of a gradient to `.grad`, and call the hooks that wait for that."""
    if parameter.sharded_param.grad is None:
        parameter.sharded_param.grad = parameter.to_sharded_dtensor(part)
    else:
        parameter.sharded_param.grad._local_tensor += part
    for hook in (getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter.sharded_param)
