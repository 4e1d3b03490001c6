"""Private interfaces of FSDP2 (`torch.distributed.fsdp.fully_shard`): parameter groups, the sharding of each parameter, and the hooks that
unshard (all-gather) and reshard parameters.

A *state* is torch's FSDPState of one `fully_shard` call. A *group* is an FSDPParamGroup: the parameters of a state on one mesh. A
*parameter* is an FSDPParam. A gradient is *unreduced* until it has been reduce-scattered.
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

# The attributes of states, groups and parameters that this module uses. In every supported release of torch they exist by the first step.
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
# More attributes that torch 2.15 needs (see `_keeps_unreduced_in_grad`).
_IN_GROUP_2_15 = ("_post_backward_pending", "_partial_reduce_output_layout")
_IN_PARAMETER_2_15 = ("unsharded_grad_dtype", "sharded_grad_dtype")
_FUNCTIONS = (
    "torch.distributed.fsdp.CPUOffloadPolicy",
    "torch.distributed.fsdp._common_utils.collect_grad_tensors",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultReduceScatter",
    "torch.distributed.fsdp._fully_shard._fsdp_collectives._get_gradient_divide_factors",
    "torch.distributed.utils._to_kwargs",
)
# The attributes that this module assigns to.
_WRITTEN = (
    "_pre_forward", "_post_forward", "unshard", "wait_for_unshard", "reshard", "post_backward", "_partial_reduce_output",
    "_partial_reduce_output_layout", "_post_backward_pending",
)  # fmt: skip
_MISSING = object()


def missing_in(modules: Iterable[Any]) -> str:
    """Returns the first name that this module needs and this torch's FSDP2 lacks; "" if there is none. Each missing name is logged once."""
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
        for parameter in group.fsdp_params[:1]:  # all parameters are of one class
            if missing := _lacks(parameter, _IN_PARAMETER):
                return _reported(missing)
            missing = _lacks(group, _IN_GROUP_2_15) or _lacks(parameter, _IN_PARAMETER_2_15)
            if missing and _keeps_unreduced_in_grad(parameter):
                return _reported(missing)
    return ""


def _lacks(item: Any, names: Sequence[str]) -> str:
    """Returns the first of these names that neither an object nor its class has; "" if there is none."""
    return next((f"{type(item).__name__}.{name}" for name in names if not _has(item, name)), "")


def _has(item: Any, name: str) -> bool:
    """True if an object has the attribute (settable, if it is one of `_WRITTEN`), or its class declares it by an annotation.

    The attribute is not read, because the first forward pass sets some attributes, and some properties raise before it.
    """
    attribute = inspect.getattr_static(item, name, _MISSING)
    if name in _WRITTEN and isinstance(attribute, property):
        return attribute.fset is not None
    return attribute is not _MISSING or any(name in vars(cls).get("__annotations__", ()) for cls in type(item).__mro__)


def _keeps_unreduced_in_grad(parameter: Parameter) -> bool:
    """True if torch keeps unreduced gradients in `.grad` of the unsharded parameter (torch 2.15).

    Earlier releases keep them in `unsharded_accumulated_grad`.
    """
    return isinstance(getattr(type(parameter), "unsharded_accumulated_grad", None), property)


@functools.cache
def _reported(missing: str) -> str:
    """Logs the name of a missing attribute or function, unless the name is "". Returns the name."""
    if missing:
        log.warning("FSDP2 of torch %s has no %s: torch's own hooks gather the parameters of steps", torch.__version__, missing)
    return missing


def fsdp_modules(objects: Iterable[Any]) -> list[torch.nn.Module]:
    """Returns the modules among these objects to which `fully_shard` was applied, each once."""
    fsdp_module = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return [] if fsdp_module is None else list({id(item): item for item in objects if isinstance(item, fsdp_module)}.values())


def states_of(modules: Iterable[Any]) -> list[State]:
    """Returns the modules' states, each once."""
    return list({id(state): state for state in (module._get_fsdp_state() for module in modules)}.values())


def groups_of(state: State) -> Sequence[Group]:
    """Returns the groups of a state, in the order in which they are unsharded."""
    found: Sequence[Group] = state._fsdp_param_groups
    return found


def prepare(modules: Sequence[Any]) -> None:
    """Prepares modules for a step, unless `missing_in` reports a name: runs torch's lazy initialisation if needed, and reshards."""
    if missing_in(modules):
        return
    states = states_of(modules)
    if any(state._is_root is None for state in states):
        nested = {id(child) for module in modules for child in module.modules() if child is not module}
        for state in states_of(module for module in modules if id(module) not in nested):
            if state._is_root is None and len(state._modules) == 1:
                state._lazy_init()
    for state in states:
        for group in groups_of(state):
            if _needs_unsharded(group) and not unsupported_feature(state):
                group.unshard()  # a collective, which all processes call in their first step
                group.wait_for_unshard()
            reshard(group)


def _needs_unsharded(group: Group) -> bool:
    """True if unreduced gradients belong in unsharded parameters that do not exist yet. torch creates them in the first unshard."""
    return any(_keeps_unreduced_in_grad(parameter) and not hasattr(parameter, "unsharded_param") for parameter in group.fsdp_params)


def reshard(group: Group) -> None:
    """Reshards a group, as between two steps, after it has moved unreduced gradients to the attribute from which torch reads them next."""
    for parameter in group.fsdp_params:
        unsharded = getattr(parameter, "unsharded_param", None)
        if not _keeps_unreduced_in_grad(parameter) and unsharded is not None and unsharded.grad is not None:
            add_unreduced_gradient(parameter, unsharded.grad)
            unsharded.grad = None
    group._to_sharded()  # no effect if the group is sharded already


def unsupported_feature(state: State) -> str:
    """Returns the name of a feature that the state uses and functional collectives do not support; "" if there is none."""
    from torch.distributed.fsdp import CPUOffloadPolicy
    from torch.distributed.fsdp._fully_shard import _fsdp_collectives as collectives

    if state._is_root is None:
        return "modules that belong to no single root module"
    for group in groups_of(state):
        reasons = {
            "parameters that are replicated, not sharded": not hasattr(group.mesh_info, "shard_process_group"),
            "dp_mesh_dims": group.mesh_info.is_spmd_mesh,
            "a hook for all-reduces": group._all_reduce_hook is not None,
            "custom collectives": type(group._all_gather_comm) is not collectives.DefaultAllGather
            or type(group._reduce_scatter_comm) is not collectives.DefaultReduceScatter,
            "parameters that are offloaded": isinstance(group.offload_policy, CPUOffloadPolicy),
            "gradients in another dtype (grad_dtype)": any(
                getattr(parameter, "_has_sharded_grad_dtype_override", False) for parameter in group.fsdp_params
            ),
            "parameters with spmd_types": any(getattr(parameter, "is_spmd_types", False) for parameter in group.fsdp_params),
            "tensors with a custom gather (fsdp_pre_all_gather)": any(
                hasattr(local_shard(parameter), "fsdp_pre_all_gather") for parameter in group.fsdp_params
            ),
        }
        if reason := next((reason for reason, holds in reasons.items() if holds), ""):
            return reason
    return ""


@contextlib.contextmanager
def replaced_hooks(state: State, pre_forward: Callable[..., Any], post_forward: Callable[..., Any]) -> Iterator[None]:
    """Replaces a state's hooks inside the context.

    Args:
        state: The state.
        pre_forward: Called with (module, args, kwargs); returns the arguments with which the module is called.
        post_forward: Called with (module, args, output); returns the output.
    """
    handles = state._pre_forward_hook_handle, state._post_forward_hook_handle
    hook_ids = {handle.id for item in handles for handle in getattr(item, "handles", (item,))}
    replaced: list[tuple[Any, int, Any]] = []
    for module in state._modules:
        for hooks, replacement in ((module._forward_pre_hooks, pre_forward), (module._forward_hooks, post_forward)):
            for hook_id in hook_ids & hooks.keys():
                replaced.append((hooks, hook_id, hooks[hook_id]))
                hooks[hook_id] = replacement
    state._pre_forward, state._post_forward = pre_forward, post_forward  # for `register_fsdp_forward_method`
    try:
        yield
    finally:
        del state._pre_forward, state._post_forward
        for hooks, hook_id, hook in replaced:
            hooks[hook_id] = hook


@contextlib.contextmanager
def replaced_methods(
    group: Group, unshard: Callable[[], object], reshard: Callable[[], object], end_backward: Callable[[], object]
) -> Iterator[None]:
    """Replaces a group's methods inside the context.

    Args:
        group: The group.
        unshard: Called when a user requests the group's unsharded parameters (`module.unshard()`).
        reshard: Called when a user requests that the group be resharded (`module.reshard()`).
        end_backward: Called to reduce the unreduced gradients (`module.finalize_backward()` of torch 2.15).
    """
    # torch calls `unshard` to start the all-gather, and `wait_for_unshard` to finish it.
    group.unshard, group.wait_for_unshard, group.reshard, group.post_backward = (
        (lambda async_op=False: None),
        unshard,
        reshard,
        end_backward,
    )
    try:
        yield
    finally:
        del group.unshard, group.wait_for_unshard, group.reshard, group.post_backward


def modules_of(state: State) -> Sequence[torch.nn.Module]:
    """Returns the modules that the state covers: one module, or several that `fully_shard` was given as a list."""
    found: Sequence[torch.nn.Module] = state._modules
    return found


def to_device(state: State, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of a root module, moved to the device of its parameters."""
    if state._device.type == "cpu" or not (args or kwargs):
        return args, kwargs
    moved, named = torch.distributed.utils._to_kwargs(args, kwargs, state._device, False)
    return moved[0], named[0]


def cast_inputs(state: State, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Returns the arguments of a module, cast as its mixed-precision policy says."""
    found: tuple[Any, Any] = state._cast_forward_inputs(args, kwargs)
    return found


def cast_output(state: State, output: Any) -> Any:
    """Returns the output of a module, cast as its mixed-precision policy says."""
    return state._cast_output_dtype(output)


def tensors_with_gradient(output: Any) -> list[torch.Tensor]:
    """Returns the tensors in a module's output that require a gradient."""
    from torch.distributed.fsdp._common_utils import collect_grad_tensors

    return list(collect_grad_tensors(output))


# Groups


def is_resharded_after_forward(group: Group) -> bool:
    """True if the group is resharded after the forward pass instead of being kept for the backward pass."""
    return group.post_forward_mesh_info is not None


def shard_group(group: Group) -> Any:
    """Returns the process group over which the group's parameters are sharded."""
    return group.mesh_info.shard_process_group


def reduce_group(group: Group) -> Any:
    """Returns the process group of the reduce-scatter of the group's gradients."""
    return group._reduce_scatter_process_group


def replica_group(group: Group) -> Any | None:
    """Returns the process group over which the same shards are replicated; None without replication."""
    return getattr(group.mesh_info, "replicate_process_group", None)


def reduction_order(group: Group) -> Sequence[Parameter]:
    """Returns the group's parameters in the order in which their gradients are reduced: grouped by dtype."""
    dtypes = [gradient_dtype(parameter) for parameter in group.fsdp_params]
    return sorted(group.fsdp_params, key=lambda parameter: dtypes.index(gradient_dtype(parameter)))


def set_reduction_pending(group: Group, is_pending: bool) -> None:
    """Sets torch's flag that a group's gradients are still unreduced, at the end of a backward pass. Releases before 2.15 have no flag."""
    if getattr(group, "_post_backward_pending", is_pending) != is_pending:
        group._post_backward_pending = is_pending


def has_partial_gradient(group: Group, parameter: Parameter) -> bool:
    """True if torch (2.15) has recorded a slice of `partial_gradients` for this parameter. Without a new gradient, it adds zeros."""
    return group._partial_reduce_output is not None and parameter in getattr(group, "_partial_reduce_output_layout", ())


def partial_gradients(group: Group, parameters: Sequence[Parameter]) -> torch.Tensor | None:
    """Returns the gradients of these parameters that were reduce-scattered but not yet all-reduced over replicas; None if there are none.

    They are one flat tensor, in the order of `parameters`. Each gradient has the size of a padded shard.
    """
    flat: torch.Tensor | None = group._partial_reduce_output
    layout = getattr(group, "_partial_reduce_output_layout", None)
    if flat is None or layout is None or layout == _layout(parameters):
        return flat
    sizes = {parameter: parameter.padded_sharded_param_size.numel() for parameter in parameters}
    return torch.cat([flat.narrow(0, *layout[item]) if item in layout else flat.new_zeros(size) for item, size in sizes.items()])


def set_partial_gradients(group: Group, parameters: Sequence[Parameter], value: torch.Tensor | None) -> None:
    """Stores a flat tensor as `partial_gradients` returns it."""
    group._partial_reduce_output = value
    layout = _layout(parameters)
    if value is not None and getattr(group, "_partial_reduce_output_layout", layout) != layout:
        group._partial_reduce_output_layout = layout


def _layout(parameters: Sequence[Parameter]) -> dict[Parameter, tuple[int, int]]:
    """Returns the offset and the length of each parameter's gradient in the flat tensor of `partial_gradients`."""
    layout, offset = {}, 0
    for parameter in parameters:
        size = parameter.padded_sharded_param_size.numel()
        layout[parameter] = offset, size
        offset += size
    return layout


def reduction_factors(group: Group, dtype: torch.dtype) -> tuple[float, float, str, str]:
    """Returns how gradients of a dtype are reduced.

    Returns: the divisor before the reduction, the divisor after it, the op of the reduce-scatter, and the op of the all-reduce over
    replicas. An op is "avg" or "sum".
    """
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    factor = group.gradient_divide_factor
    before, after, scatter, all_reduce = _get_gradient_divide_factors(
        reduce_group(group), replica_group(group), dtype, group.device.type, factor, group.force_sum_reduction_for_comms
    )
    average, total = torch.distributed.ReduceOp.AVG, torch.distributed.ReduceOp.SUM
    if scatter not in (average, total):  # an op that scales before it adds: here the divisor before the reduction does the scaling
        before, scatter = factor, total
    scatter_op, all_reduce_op = ("avg" if op == average else "sum" for op in (scatter, all_reduce))
    return before or 1.0, after or 1.0, scatter_op, all_reduce_op


# Parameters


def sharded(parameter: Parameter) -> torch.nn.Parameter:
    """Returns the sharded parameter, which optimizers update."""
    found: torch.nn.Parameter = parameter.sharded_param
    return found


def local_shard(parameter: Parameter) -> torch.Tensor:
    """Returns this process's shard itself, not a view of it."""
    found: torch.Tensor = parameter.sharded_param._local_tensor
    return found


def shard_sizes(parameter: Parameter) -> tuple[torch.Size, torch.Size, torch.Size, int]:
    """Returns the shapes of this process's shard, of a padded shard (the same on all processes) and of the unsharded parameter, and the
    sharded dimension."""
    return parameter.sharded_size, parameter.padded_sharded_param_size, parameter._orig_size, parameter.fsdp_placement.dim


def compute_dtype(parameter: Parameter) -> torch.dtype:
    """Returns the dtype in which the parameter is all-gathered and used."""
    found: torch.dtype = parameter.param_dtype or parameter.orig_dtype
    return found


def gradient_dtype(parameter: Parameter) -> torch.dtype:
    """Returns the dtype of `.grad` of the sharded parameter."""
    found: torch.dtype = parameter.sharded_grad_dtype if _keeps_unreduced_in_grad(parameter) else parameter.orig_dtype
    return found


def unreduced_dtype(parameter: Parameter) -> torch.dtype | None:
    """Returns the dtype of unreduced gradients; None for the dtype in which they are computed."""
    found: torch.dtype | None = parameter.unsharded_grad_dtype if _keeps_unreduced_in_grad(parameter) else parameter.reduce_dtype
    return found


def mixes_dtypes(parameter: Parameter) -> bool:
    """True if torch reduces gradients of several dtypes together, in one common dtype (torch 2.15)."""
    return _keeps_unreduced_in_grad(parameter)


def wrap_unsharded(parameter: Parameter, local: torch.Tensor) -> torch.Tensor:
    """Returns the tensor that modules see as the unsharded parameter: `local`, or with tensor parallelism a DTensor of it."""
    if parameter._unsharded_dtensor_spec is None:
        return local
    spec = parameter._unsharded_dtensor_spec
    if spec.tensor_meta is not None:
        spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    return wrap(local, spec)


def wrap(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """Returns a DTensor with this local tensor and this DTensorSpec."""
    from torch.distributed.tensor import DTensor

    found: torch.Tensor = DTensor(local, spec, requires_grad=False)
    return found


def unwrap(tensor: Any) -> tuple[torch.Tensor, Any]:
    """Returns a DTensor's local tensor and DTensorSpec; for any other tensor, the tensor itself and None."""
    return (tensor._local_tensor, tensor._spec) if hasattr(tensor, "_spec") else (tensor, None)


def set_on_modules(parameter: Parameter, tensor: torch.Tensor) -> None:
    """Makes a tensor the attribute of all modules that share the parameter, in place of the parameter."""
    tensor._is_param = True  # makes `isinstance(tensor, torch.nn.Parameter)` true
    parameter._setattr_on_modules(tensor)


def restore_sharded(parameter: Parameter) -> None:
    """Makes the sharded parameter the attribute of all modules that share it again."""
    parameter._setattr_on_modules(parameter.sharded_param)


def unreduced_gradient(parameter: Parameter) -> torch.Tensor | None:
    """Returns the unreduced gradient of the unsharded parameter, summed over earlier backward passes; None if there is none."""
    found: torch.Tensor | None = parameter.unsharded_accumulated_grad
    return found


def clear_unreduced_gradient(parameter: Parameter) -> None:
    """Clears the unreduced gradient; see `unreduced_gradient`."""
    _set_unreduced_gradient(parameter, None)


def add_unreduced_gradient(parameter: Parameter, gradient: torch.Tensor) -> None:
    """Adds to the unreduced gradient; see `unreduced_gradient`."""
    before, dtype = unreduced_gradient(parameter), unreduced_dtype(parameter)
    gradient = gradient if dtype is None else gradient.to(dtype)
    _set_unreduced_gradient(parameter, gradient if before is None else before + gradient)


def _set_unreduced_gradient(parameter: Parameter, gradient: torch.Tensor | None) -> None:
    if _keeps_unreduced_in_grad(parameter):
        parameter.unsharded_param.grad = gradient
    else:
        parameter.unsharded_accumulated_grad = gradient


def local_gradient(parameter: Parameter, gradient: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor of a gradient of the unsharded parameter, with the parameter's own placements (tensor parallelism)."""
    found: torch.Tensor = parameter._get_grad_inner_tensor(gradient)
    return found


def add_gradient(parameter: Parameter, part: torch.Tensor) -> None:
    """Adds this process's shard of a gradient to `.grad`, and calls the post-accumulate-grad hooks."""
    if parameter.sharded_param.grad is None:
        parameter.sharded_param.grad = parameter.to_sharded_dtensor(part)
    else:
        parameter.sharded_param.grad._local_tensor += part
    for hook in (getattr(parameter.sharded_param, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter.sharded_param)
