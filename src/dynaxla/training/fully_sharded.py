"""FSDP2 (`fully_shard`) inside a step: parameters are gathered, and their gradients reduced, by collectives that can be recorded.

torch's own hooks resize and fill the memory of unsharded parameters, which cannot be recorded. Inside a step these hooks are replaced. When
a module of a parameter group is called, the group's parameters are gathered, by one collective for each dtype. If the group is resharded
after its forward pass, autograd saves no unsharded parameters, and the backward pass gathers the parameters again. As soon as all gradients
of a group have been computed, one reduce-scatter reduces them, followed by one all-reduce if the shards have replicas.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..runtime import private
from ..runtime import private_fsdp as fsdp
from ..runtime.guards import is_not_observed

modules_among = fsdp.fsdp_modules
prepare = fsdp.prepare
_functional = torch.ops._c10d_functional


def why_not(modules: Sequence[Any]) -> str:
    """Returns the reason why a step cannot gather these modules' parameters; "" if it can."""
    if missing := fsdp.missing_in(modules):
        return f"internals that this version of torch does not have ({missing})"
    return next(filter(None, map(fsdp.unsupported_feature, fsdp.states_of(modules))), "")


@contextlib.contextmanager
def functional_collectives(modules: Sequence[Any]) -> Iterator[None]:
    """Inside the context, these modules gather parameters and reduce gradients by functional collectives. Call `prepare` first."""
    call = _StepCall(modules)
    with contextlib.ExitStack() as stack:
        stack.callback(call.reshard)
        for state in call.states:
            stack.enter_context(fsdp.replaced_hooks(state.state, state.pre_forward, state.post_forward))
        for group in call.groups:
            stack.enter_context(fsdp.replaced_methods(group.group, group.unshard, group.reshard, group.end_backward))
        yield


class _StepCall:
    """One call of a step.

    Attributes:
        states: one per `fully_shard` call.
        groups: the parameter groups of all states.
        root: the state whose module runs the outermost forward pass; None outside a forward pass.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self.states = [_ShardedState(state, self) for state in fsdp.states_of(modules)]
        self.groups = [group for state in self.states for group in state.groups]
        self.root: _ShardedState | None = None
        # True if the running backward pass will call `finish` at its end.
        self._is_finish_scheduled = False
        # By storage id of an unsharded parameter: its group, and its position in the group.
        self._unsharded_storages: dict[int, tuple[_ParameterGroup, int]] = {}
        self._hooks = contextlib.ExitStack()

    def reshard(self) -> None:
        """Gives all modules their sharded parameters back."""
        self.end()
        for group in self.groups:
            group.reshard()

    def begin(self, state: _ShardedState) -> bool:
        """Begins an outermost forward pass, if a module of `state` begins one. Returns: True if it does.

        It does not inside another state's forward pass, or in a backward pass.
        """
        if self.root not in (None, state) or private.backward_id() != -1:
            return False
        self.end()  # in case an earlier forward pass has raised
        self.root, self._is_finish_scheduled = state, False
        if private.saved_tensor_hooks() is None:  # the user's own hooks must get the parameters, too
            self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
        return True

    def end(self) -> None:
        """Ends the outermost forward pass."""
        self.root = None
        self._hooks.close()

    def schedule_finish(self) -> None:
        """Schedules `finish` for the end of the running backward pass, once."""
        if not self._is_finish_scheduled:
            self._is_finish_scheduled = True
            private.call_after_backward(self.finish)

    def finish(self) -> None:
        """Ends a backward pass, after all gradients have been computed."""
        self._is_finish_scheduled = False
        for group in self.groups:
            group.end_backward()

    # Tensors that autograd saves.

    def add_storages(self, group: _ParameterGroup, unsharded: Sequence[torch.Tensor]) -> None:
        """Adds the storages of a group's unsharded parameters, so that `pack` finds views of them."""
        for index, value in enumerate(unsharded):
            self._unsharded_storages[private.storage_id(fsdp.unwrap(value)[0])] = group, index

    def remove_storages(self, unsharded: Sequence[torch.Tensor]) -> None:
        """Removes the storages of these unsharded parameters."""
        for value in unsharded:
            self._unsharded_storages.pop(private.storage_id(fsdp.unwrap(value)[0]), None)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns the object that autograd saves for a tensor: a `_SavedView` for a view of an unsharded parameter, else the tensor."""
        local, spec = fsdp.unwrap(tensor)
        if local.layout != torch.strided or (position := self._unsharded_storages.get(private.storage_id(local))) is None:
            return tensor
        return _SavedView(*position, (local.shape, local.stride(), local.storage_offset()), local.dtype, spec)

    def unpack(self, saved: Any) -> torch.Tensor:
        """Returns the tensor for an object that `pack` returned. If its parameter has been freed, the group is gathered again."""
        if not isinstance(saved, _SavedView):
            assert isinstance(saved, torch.Tensor)
            return saved
        self.schedule_finish()
        with torch.no_grad():
            value, _ = fsdp.unwrap(saved.group.value(saved.index))
            local = _view(value if value.dtype == saved.dtype else value.view(saved.dtype), *saved.geometry)
            return local if saved.spec is None else fsdp.wrap(local, saved.spec)


@dataclass(frozen=True)
class _SavedView:
    """The description of a view of an unsharded parameter, which autograd saves instead of the view.

    Attributes:
        group: the parameter's group.
        index: the parameter's position in the group.
        geometry: size, strides and offset of the view in the parameter's storage.
        dtype: the view's dtype.
        spec: the DTensorSpec of a view that is a DTensor, else None.
    """

    group: _ParameterGroup
    index: int
    geometry: tuple[torch.Size, tuple[int, ...], int]
    dtype: torch.dtype
    spec: Any


def _view(value: torch.Tensor, size: torch.Size, stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """Returns a view of a value's storage with this geometry. If possible it is a permutation, which XLA runs faster than as_strided."""
    dims = list(zip(value.shape, value.stride(), strict=True))
    wanted_dims = list(zip(size, stride, strict=True))
    if offset != value.storage_offset() or sorted(dims) != sorted(wanted_dims):
        return value.as_strided(size, stride, offset)
    order: list[int] = []
    for item in wanted_dims:
        order.append(next(dim for dim, other in enumerate(dims) if other == item and dim not in order))
    return value if order == list(range(len(order))) else value.permute(order)


class _ShardedState:
    """The hooks of one `fully_shard` call."""

    def __init__(self, state: fsdp.State, call: _StepCall) -> None:
        self.state, self._call = state, call
        self.groups = [_ParameterGroup(group, call) for group in fsdp.groups_of(state)]
        # The state's modules that have not yet run in the current forward pass.
        self._pending_modules: set[torch.nn.Module] = set()

    def pre_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Runs before a module of the state is called; returns its arguments, moved and cast as torch's hook does."""
        if not self._pending_modules:
            self._pending_modules.update(fsdp.modules_of(self.state))
        if self._call.begin(self):
            args, kwargs = fsdp.to_device(self.state, args, kwargs)
        # The state's groups are read at every call, so that the guards see their settings and unreduced gradients.
        for group, _ in zip(self.groups, fsdp.groups_of(self.state), strict=True):
            group.unshard()
        return fsdp.cast_inputs(self.state, args, kwargs)

    def post_forward(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """Runs after a module of the state has been called; returns its output, cast as torch's hook does."""
        self._pending_modules.discard(module)
        if not self._pending_modules:
            self._complete(output)
        if self._call.root is self:
            self._call.end()
            for state in reversed(self._call.states):
                if state._pending_modules:
                    state._complete(output)
        return fsdp.cast_output(self.state, output)

    def _complete(self, output: Any) -> None:
        self._pending_modules.clear()
        if private.backward_id() != -1:  # recomputation of a checkpoint: the backward pass continues with these parameters
            return
        for group in self.groups:
            group.end_forward()
        if torch.is_grad_enabled():
            for tensor in fsdp.tensors_with_gradient(output):
                _register_hook(tensor, self._pre_backward)

    def _pre_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """Runs when a backward pass reaches the state's modules. Gathers the parameters, because checkpointed regions may be recomputed."""
        self._call.schedule_finish()
        for group in self.groups:
            if group.group.unshard_in_backward:
                group.unshard()
        return gradient


class _ParameterGroup:
    """Parameters that are gathered together.

    Attributes:
        group: torch's parameter group.
        unsharded: the unsharded parameters, detached, while modules have them; else None.
    """

    def __init__(self, group: fsdp.Group, call: _StepCall) -> None:
        self.group, self._call = group, call
        self.unsharded: list[torch.Tensor] | None = None
        # True if a backward pass has used the unsharded parameters. The next `unshard` then makes a new autograd node.
        self._is_used_in_backward = False
        # True if the running backward pass has reduced the group's gradients.
        self._is_reduced = False

    def unshard(self) -> None:
        """Gives modules their unsharded parameters, and gathers the parameters if no module has them."""
        parameters = self.group.fsdp_params
        if self.unsharded is None:
            with torch.no_grad():
                self.unsharded = _all_gather(self.group)
            if fsdp.is_resharded_after_forward(self.group):
                self._call.add_storages(self, self.unsharded)
        elif not self._is_used_in_backward:
            return
        self._is_used_in_backward = False
        needed = [fsdp.sharded(parameter).requires_grad for parameter in parameters]
        tensors = _with_grad_fn(self, needed, self.unsharded) if any(needed) else self.unsharded
        for parameter, tensor in zip(parameters, tensors, strict=True):
            fsdp.set_on_modules(parameter, tensor)

    def value(self, index: int) -> torch.Tensor:
        """Returns an unsharded parameter, and gathers it if modules do not have it."""
        self.unshard()
        assert self.unsharded is not None
        return self.unsharded[index]

    def end_forward(self) -> None:
        """Runs after the group's modules: frees the unsharded parameters if the group is resharded after its forward pass."""
        if fsdp.is_resharded_after_forward(self.group):
            self.reshard()

    def reshard(self) -> None:
        """Gives modules their sharded parameters back."""
        if self.unsharded is None:
            return
        self._call.remove_storages(self.unsharded)
        self.unsharded = None
        for parameter in self.group.fsdp_params:
            fsdp.restore_sharded(parameter)

    def accumulate(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Accumulates gradients of unsharded parameters from a backward pass, and reduces them."""
        self._call.schedule_finish()
        with torch.no_grad():
            for parameter, gradient in zip(self.group.fsdp_params, gradients, strict=True):
                if gradient is not None:
                    fsdp.add_unreduced_gradient(parameter, gradient)
            self._reduce_gradients()

    def end_backward(self) -> None:
        """Runs at the end of a backward pass. If this pass has computed no gradients for the group, reduces those of earlier passes."""
        with torch.no_grad():
            if not self._is_reduced:
                self._reduce_gradients()
        self._is_reduced = False

    def _reduce_gradients(self) -> None:
        self._is_reduced = self._is_used_in_backward = True
        if self.group.reshard_after_backward:
            self.reshard()
        if self.group.reduce_grads:
            _reduce_gradients(self.group)
        fsdp.set_reduction_pending(self.group, not self.group.reduce_grads)


class _Unsharded(torch.autograd.Function):
    """The identity on a group's unsharded parameters. Its backward pass reduces their gradients to gradients of the sharded parameters."""

    @staticmethod
    def forward(ctx: Any, group: _ParameterGroup, needed: Sequence[bool], unsharded: Sequence[torch.Tensor], _: torch.Tensor) -> Any:
        ctx.group = group
        ctx.set_materialize_grads(False)
        outputs = tuple(value.detach() for value in unsharded)
        ctx.mark_non_differentiable(*(output for output, is_needed in zip(outputs, needed, strict=True) if not is_needed))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.group.accumulate(gradients)
        return None, None, None, None


@is_not_observed
def _with_grad_fn(group: _ParameterGroup, needed: Sequence[bool], unsharded: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Returns unsharded parameters with a `grad_fn` that passes their gradients to the group, for one backward pass."""
    with torch.enable_grad():
        found: Sequence[torch.Tensor] = _Unsharded.apply(group, needed, list(unsharded), _ANCHOR)
        return found


@is_not_observed
def _register_hook(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor.register_hook(function)


is_not_observed(private.call_after_backward)
# A differentiable input of `_Unsharded`, so that autograd calls its backward pass. It gets no gradient.
_ANCHOR = torch.zeros(0, requires_grad=True)


def _all_gather(group: fsdp.Group) -> list[torch.Tensor]:
    """Gathers a group's unsharded parameters, with one collective for each dtype."""
    processes = fsdp.shard_group(group)
    count = processes.size()
    by_dtype: dict[torch.dtype, list[int]] = {}
    order = range(len(group.fsdp_params))
    # The order is reversed in a backward pass. Otherwise XLA would merge the equal concatenations of the two passes into one, and keep its
    # result in memory between the passes.
    for index in reversed(order) if private.backward_id() != -1 else order:
        by_dtype.setdefault(fsdp.compute_dtype(group.fsdp_params[index]), []).append(index)
    found: dict[int, torch.Tensor] = {}
    for dtype, indices in by_dtype.items():
        parts = [_padded_shard(group.fsdp_params[index], dtype) for index in indices]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        if count > 1:
            flat = _functional.wait_tensor(_functional.all_gather_into_tensor(flat, count, processes.group_name))
        pieces = flat.view(count, -1).split([part.numel() for part in parts], 1)
        for index, piece in zip(indices, pieces, strict=True):
            found[index] = fsdp.wrap_unsharded(group.fsdp_params[index], _concatenated_shards(group.fsdp_params[index], piece))
    return [found[index] for index in order]


def _padded_shard(parameter: fsdp.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """Returns this process's shard, flattened, and padded to the common length of all shards."""
    _, padded, _, _ = fsdp.shard_sizes(parameter)
    part = fsdp.local_shard(parameter).to(dtype).reshape(-1)
    missing = padded.numel() - part.numel()
    return torch.cat([part, part.new_zeros(missing)]) if missing else part


def _concatenated_shards(parameter: fsdp.Parameter, pieces: torch.Tensor) -> torch.Tensor:
    """Returns the unsharded parameter, in new memory. `pieces` has the padded shard of each process as a row."""
    _, padded, unsharded, dim = fsdp.shard_sizes(parameter)
    parts = pieces.reshape(len(pieces), *padded)
    joined = torch.cat(list(parts), dim).contiguous() if dim else parts.reshape(-1, *padded[1:]).narrow(0, 0, unsharded[0])
    return joined.clone(memory_format=torch.contiguous_format)


def _reduce_gradients(group: fsdp.Group) -> None:
    """Adds the mean over all processes of the unreduced gradients to each sharded parameter's gradient."""
    parameters, gradients = [], []
    for parameter in fsdp.reduction_order(group):
        gradient = fsdp.unreduced_gradient(parameter)
        is_unused = group.reduce_scatter_unused_params and fsdp.sharded(parameter).requires_grad
        if gradient is not None:
            fsdp.clear_unreduced_gradient(parameter)
        elif is_unused or fsdp.has_partial_gradient(group, parameter):
            dtype = fsdp.unreduced_dtype(parameter) or fsdp.compute_dtype(parameter)
            gradient = fsdp.wrap_unsharded(parameter, torch.zeros(fsdp.shard_sizes(parameter)[2], dtype=dtype, device=group.device))
        else:
            continue
        parameters.append(parameter)
        gradients.append(fsdp.local_gradient(parameter, gradient))
    if not parameters:
        return
    if len({gradient.dtype for gradient in gradients}) > 1 and not fsdp.mixes_dtypes(parameters[0]):
        raise RuntimeError(f"FSDP: the gradients of one group have different dtypes: {sorted({str(item.dtype) for item in gradients})}")
    processes, replicas = fsdp.reduce_group(group), fsdp.replica_group(group)
    count, dtype = processes.size(), functools.reduce(torch.promote_types, [gradient.dtype for gradient in gradients])
    before, after, scatter, everywhere = fsdp.reduction_factors(group, dtype)
    rows = [
        _padded_rows(gradient, fsdp.shard_sizes(parameter)[3], count) for parameter, gradient in zip(parameters, gradients, strict=True)
    ]
    flat = torch.cat(rows, 1).to(dtype).reshape(-1) / before
    if count > 1:
        flat = _functional.wait_tensor(_functional.reduce_scatter_tensor(flat, scatter, count, processes.group_name))
    elif group.gradient_divide_factor is not None:
        flat = flat / group.gradient_divide_factor
    if replicas is not None:
        if (partial := fsdp.partial_gradients(group, parameters)) is not None:
            flat = flat + partial
        fsdp.set_partial_gradients(group, parameters, None if group.all_reduce_grads else flat)
        if not group.all_reduce_grads:
            return
        flat = _functional.wait_tensor(_functional.all_reduce(flat, everywhere, replicas.group_name))
    flat = flat / after
    for parameter, part in zip(parameters, flat.split([row.shape[1] for row in rows]), strict=True):
        size = fsdp.shard_sizes(parameter)[0]
        fsdp.add_gradient(parameter, part[: size.numel()].view(size).to(fsdp.gradient_dtype(parameter), copy=True))


def _padded_rows(gradient: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Returns a gradient as a matrix with one row for each process: the padded shard of that process."""
    if dim:
        gradient = torch.cat(gradient.chunk(count, dim))
    missing = math.ceil(gradient.shape[0] / count) * count - gradient.shape[0]
    if missing:
        gradient = torch.cat([gradient, gradient.new_zeros(missing, *gradient.shape[1:])])
    return gradient.reshape(count, -1)
