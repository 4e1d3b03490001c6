"""FSDP2 (`fully_shard`) inside a step: parameters are gathered, and their gradients reduced, by collectives that the step notes.

torch's own hooks free and fill the memory of whole parameters, which a recording cannot note. Inside a step
they are set aside. A module of a group that is called finds whole parameters, gathered by one collective for each dtype. If the group is
freed after its forward pass, autograd keeps nothing of them: the backward pass gathers them again. The gradients of a group are reduced by
one collective, as soon as all of them are there.
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

found_in = fsdp.modules_among
prepare = fsdp.prepare


def why_not(modules: Sequence[Any]) -> str:
    """Why a step cannot gather these modules' parameters; "" if it can."""
    if missing := fsdp.missing_in(modules):
        return f"insides that this torch does not have ({missing})"
    return next(filter(None, map(fsdp.why_not_gathered, fsdp.states_of(modules))), "")


@contextlib.contextmanager
def gathering(modules: Sequence[Any]) -> Iterator[None]:
    """Inside, these modules gather parameters and reduce gradients by functional collectives. They have been prepared."""
    call = _Call(modules)
    with contextlib.ExitStack() as stack:
        stack.callback(call.drop)
        for state in call.states:
            stack.enter_context(fsdp.without_hooks(state.state, state.pre_forward, state.post_forward))
        for group in call.groups:
            stack.enter_context(fsdp.without_memory(group.group, group.gather, group.drop, group.end_backward))
        yield


class _Call:
    """One call of a step.

    Attributes: states; groups; root (the state whose module's forward pass runs; None outside of one).
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self.states = [_State(state, self) for state in fsdp.states_of(modules)]
        self.groups = [group for state in self.states for group in state.groups]
        self.root: _State | None = None
        # Whether the backward pass that runs will call `finish`.
        self._is_awaited = False
        self._places: dict[int, tuple[_Group, int]] = {}
        self._hooks = contextlib.ExitStack()

    def drop(self) -> None:
        """All modules have their own parts of parameters again."""
        self.end()
        for group in self.groups:
            group.drop()

    def begin(self, state: _State) -> bool:
        """A module of a state is called. Returns: whether its forward pass contains those of all others."""
        if self.root not in (None, state) or private.graph_task() != -1:
            return False
        self.end()  # where an earlier one has raised
        self.root, self._is_awaited = state, False
        if private.saved_tensor_hooks() is None:  # what the user does with all that autograd saves is done with parameters, too
            self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
        return True

    def end(self) -> None:
        """The forward pass that contains those of all others has ended."""
        self.root = None
        self._hooks.close()

    def await_end(self) -> None:
        """Have what a backward pass leaves to be done when it ends done then."""
        if not self._is_awaited:
            self._is_awaited = True
            private.at_end_of_backward(self.finish)

    def finish(self) -> None:
        """A backward pass has given all gradients."""
        self._is_awaited = False
        for group in self.groups:
            group.end_backward()

    # What autograd saves.

    def note(self, group: _Group, values: Sequence[torch.Tensor]) -> None:
        """These are a group's whole parameters."""
        for index, value in enumerate(values):
            self._places[private.storage_id(fsdp.unwrap(value)[0])] = group, index

    def forget(self, values: Sequence[torch.Tensor]) -> None:
        """They are not, from now on."""
        for value in values:
            self._places.pop(private.storage_id(fsdp.unwrap(value)[0]), None)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd keeps of a tensor: of views of parameters, what to look for in a gathered one."""
        local, spec = fsdp.unwrap(tensor)
        if local.layout != torch.strided or (place := self._places.get(private.storage_id(local))) is None:
            return tensor
        return _Saved(*place, (local.shape, local.stride(), local.storage_offset()), local.dtype, spec)

    def unpack(self, saved: Any) -> torch.Tensor:
        """What autograd has saved."""
        if not isinstance(saved, _Saved):
            assert isinstance(saved, torch.Tensor)
            return saved
        self.await_end()
        with torch.no_grad():
            value, _ = fsdp.unwrap(saved.group.value(saved.index))
            local = _view(value if value.dtype == saved.dtype else value.view(saved.dtype), *saved.geometry)
            return local if saved.spec is None else fsdp.wrap(local, saved.spec)


@dataclass(frozen=True)
class _Saved:
    """A view of a whole parameter. Attributes: geometry (size, strides and offset in the parameter's storage); spec (of a DTensor)."""

    group: _Group
    index: int
    geometry: tuple[torch.Size, tuple[int, ...], int]
    dtype: torch.dtype
    spec: Any


def _view(value: torch.Tensor, size: torch.Size, stride: tuple[int, ...], offset: int) -> torch.Tensor:
    """A tensor with this geometry on a value's storage; in words that a program is quick with, where there are some."""
    dims = list(zip(value.shape, value.stride(), strict=True))
    wanted = list(zip(size, stride, strict=True))
    if offset != value.storage_offset() or sorted(dims) != sorted(wanted):
        return value.as_strided(size, stride, offset)
    order: list[int] = []
    for item in wanted:
        order.append(next(dim for dim, other in enumerate(dims) if other == item and dim not in order))
    return value if order == list(range(len(order))) else value.permute(order)


class _State:
    """The hooks of one `fully_shard` call."""

    def __init__(self, state: fsdp.State, call: _Call) -> None:
        self.state, self._call = state, call
        self.groups = [_Group(group, call) for group in fsdp.groups_of(state)]
        # Those of its modules that have yet to run in the forward pass that has begun.
        self._to_come: set[torch.nn.Module] = set()

    def pre_forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Before one of its modules is called."""
        if not self._to_come:
            self._to_come.update(fsdp.modules_of(self.state))
        if self._call.begin(self):
            args, kwargs = fsdp.to_device(self.state, args, kwargs)
        # Asked for here too, since what a recorded step asks for is watched: settings, and gradients that wait.
        for group, _ in zip(self.groups, fsdp.groups_of(self.state), strict=True):
            group.gather()
        return fsdp.cast_inputs(self.state, args, kwargs)

    def post_forward(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """After one of its modules has been called."""
        self._to_come.discard(module)
        if not self._to_come:
            self._complete(output)
        if self._call.root is self:
            self._call.end()
            for state in reversed(self._call.states):
                if state._to_come:
                    state._complete(output)
        return fsdp.cast_output(self.state, output)

    def _complete(self, output: Any) -> None:
        self._to_come.clear()
        if private.graph_task() != -1:  # a checkpoint's second forward pass: the backward pass goes on with these parameters
            return
        for group in self.groups:
            group.end_forward()
        if torch.is_grad_enabled():
            for tensor in fsdp.tensors_with_gradient(output):
                _call_with_gradient(tensor, self._pre_backward)

    def _pre_backward(self, gradient: torch.Tensor) -> torch.Tensor:
        """A backward pass reaches its modules: what is computed anew in it finds whole parameters."""
        self._call.await_end()
        for group in self.groups:
            if group.group.unshard_in_backward:
                group.gather()
        return gradient


class _Group:
    """Parameters that are gathered together.

    Attributes: group; values (the whole parameters, without gradients, while modules have them).
    """

    def __init__(self, group: fsdp.Group, call: _Call) -> None:
        self.group, self._call = group, call
        self.values: list[torch.Tensor] | None = None
        # Whether the backward pass has come to what modules have; whether it has been here.
        self._is_spent = False
        self._is_reduced = False

    def gather(self) -> None:
        """Modules find whole parameters from now on."""
        parameters = self.group.fsdp_params
        if self.values is None:
            with torch.no_grad():
                self.values = _gathered(self.group)
            if fsdp.is_freed_after_forward(self.group):
                self._call.note(self, self.values)
        elif not self._is_spent:
            return
        self._is_spent = False
        needed = [fsdp.sharded(parameter).requires_grad for parameter in parameters]
        wholes = _with_gradients(self, needed, self.values) if any(needed) else self.values
        for parameter, whole in zip(parameters, wholes, strict=True):
            fsdp.put(parameter, whole)

    def value(self, index: int) -> torch.Tensor:
        """A whole parameter, gathered if modules do not have it."""
        self.gather()
        assert self.values is not None
        return self.values[index]

    def end_forward(self) -> None:
        """The modules have run."""
        if fsdp.is_freed_after_forward(self.group):
            self.drop()

    def drop(self) -> None:
        """Modules find their own parts of parameters from now on."""
        if self.values is None:
            return
        self._call.forget(self.values)
        self.values = None
        for parameter in self.group.fsdp_params:
            fsdp.take_away(parameter)

    def take(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """A backward pass has computed gradients of whole parameters."""
        self._call.await_end()
        with torch.no_grad():
            for parameter, gradient in zip(self.group.fsdp_params, gradients, strict=True):
                if gradient is not None:
                    fsdp.add_waiting(parameter, gradient)
            self._reduce()

    def end_backward(self) -> None:
        """A backward pass has ended: gradients of earlier ones are reduced, if this one had none."""
        with torch.no_grad():
            if not self._is_reduced:
                self._reduce()
        self._is_reduced = False

    def _reduce(self) -> None:
        self._is_reduced = self._is_spent = True
        if self.group.reshard_after_backward:
            self.drop()
        if self.group.reduce_grads:
            _reduce(self.group)
        fsdp.note_waiting(self.group, not self.group.reduce_grads)


class _Gathered(torch.autograd.Function):
    """A group's whole parameters, for one use of them. Its backward pass adds to the gradients of the parts."""

    @staticmethod
    def forward(ctx: Any, group: _Group, needed: Sequence[bool], values: Sequence[torch.Tensor], _: torch.Tensor) -> Any:
        ctx.group = group
        ctx.set_materialize_grads(False)
        outputs = tuple(value.detach() for value in values)
        ctx.mark_non_differentiable(*(output for output, is_needed in zip(outputs, needed, strict=True) if not is_needed))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        ctx.group.take(gradients)
        return None, None, None, None


def _with_gradients(group: _Group, needed: Sequence[bool], values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Whole parameters as autograd is to see them, for one backward pass."""
    with torch.enable_grad():
        found: Sequence[torch.Tensor] = _Gathered.apply(group, needed, list(values), _ANCHOR)
        return found


def _call_with_gradient(tensor: torch.Tensor, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor.register_hook(function)


# What runs inside of these is not the step's.
HANDLERS = (_with_gradients.__code__, _call_with_gradient.__code__, private.at_end_of_backward.__code__)
# What autograd takes for the source of whole parameters: their gradients do not go on from there by themselves.
_ANCHOR = torch.zeros(0, requires_grad=True)


def _functional() -> Any:
    return torch.ops._c10d_functional


def _gathered(group: fsdp.Group) -> list[torch.Tensor]:
    """A group's whole parameters: one collective for each dtype."""
    processes = fsdp.shard_group(group)
    count = processes.size()
    by_dtype: dict[torch.dtype, list[int]] = {}
    order = range(len(group.fsdp_params))
    # In a backward pass the other way round: of two concatenations that are the same XLA makes one, and keeps it in between.
    for index in reversed(order) if private.graph_task() != -1 else order:
        by_dtype.setdefault(fsdp.dtype_of_use(group.fsdp_params[index]), []).append(index)
    found: dict[int, torch.Tensor] = {}
    for dtype, indices in by_dtype.items():
        parts = [_padded_part(group.fsdp_params[index], dtype) for index in indices]
        flat = torch.cat(parts) if len(parts) > 1 else parts[0]
        if count > 1:
            flat = _functional().wait_tensor(_functional().all_gather_into_tensor(flat, count, processes.group_name))
        pieces = flat.view(count, -1).split([part.numel() for part in parts], 1)
        for index, piece in zip(indices, pieces, strict=True):
            found[index] = fsdp.wrap_whole(group.fsdp_params[index], _joined(group.fsdp_params[index], piece))
    return [found[index] for index in order]


def _padded_part(parameter: fsdp.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """This process's part, flat, of the length that all parts have."""
    _, padded, _, _ = fsdp.part_sizes(parameter)
    part = fsdp.own_part(parameter).to(dtype).reshape(-1)
    missing = padded.numel() - part.numel()
    return torch.cat([part, part.new_zeros(missing)]) if missing else part


def _joined(parameter: fsdp.Parameter, pieces: torch.Tensor) -> torch.Tensor:
    """The whole, in memory of its own, of all processes' parts as rows."""
    _, padded, whole, dim = fsdp.part_sizes(parameter)
    parts = pieces.reshape(len(pieces), *padded)
    joined = torch.cat(list(parts), dim).contiguous() if dim else parts.reshape(-1, *padded[1:]).narrow(0, 0, whole[0])
    return joined.clone(memory_format=torch.contiguous_format)


def _reduce(group: fsdp.Group) -> None:
    """Add to each parameter's gradient the mean over all processes of those that wait."""
    parameters, gradients = [], []
    for parameter in fsdp.in_order_of_sum(group):
        gradient = fsdp.waiting(parameter)
        is_unused = group.reduce_scatter_unused_params and fsdp.sharded(parameter).requires_grad
        if gradient is not None:
            fsdp.forget_waiting(parameter)
        elif is_unused or fsdp.has_partial_sum(group, parameter):
            dtype = fsdp.dtype_of_waiting(parameter) or fsdp.dtype_of_use(parameter)
            gradient = fsdp.wrap_whole(parameter, torch.zeros(fsdp.part_sizes(parameter)[2], dtype=dtype, device=group.device))
        else:
            continue
        parameters.append(parameter)
        gradients.append(fsdp.gradient_part(parameter, gradient))
    if not parameters:
        return
    if len({gradient.dtype for gradient in gradients}) > 1 and not fsdp.mixes_dtypes(parameters[0]):
        raise RuntimeError(f"FSDP: the gradients of one group have different dtypes: {sorted({str(item.dtype) for item in gradients})}")
    processes, replicas = fsdp.reduce_group(group), fsdp.replica_group(group)
    count, dtype = processes.size(), functools.reduce(torch.promote_types, [gradient.dtype for gradient in gradients])
    before, after, scatter, everywhere = fsdp.scaling(group, dtype)
    rows = [_rows(gradient, fsdp.part_sizes(parameter)[3], count) for parameter, gradient in zip(parameters, gradients, strict=True)]
    flat = torch.cat(rows, 1).to(dtype).reshape(-1) / before
    if count > 1:
        flat = _functional().wait_tensor(_functional().reduce_scatter_tensor(flat, scatter, count, processes.group_name))
    elif group.gradient_divide_factor is not None:
        flat = flat / group.gradient_divide_factor
    if replicas is not None:
        if (partial := fsdp.partial_sum(group, parameters)) is not None:
            flat = flat + partial
        fsdp.keep_partial_sum(group, parameters, None if group.all_reduce_grads else flat)
        if not group.all_reduce_grads:
            return
        flat = _functional().wait_tensor(_functional().all_reduce(flat, everywhere, replicas.group_name))
    flat = flat / after
    for parameter, part in zip(parameters, flat.split([row.shape[1] for row in rows]), strict=True):
        size = fsdp.part_sizes(parameter)[0]
        fsdp.add_gradient(parameter, part[: size.numel()].view(size).to(fsdp.dtype_of_gradient(parameter), copy=True))


def _rows(gradient: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """A gradient cut as its parameter is: a row for each process, all of one length."""
    if dim:
        gradient = torch.cat(gradient.chunk(count, dim))
    missing = math.ceil(gradient.shape[0] / count) * count - gradient.shape[0]
    if missing:
        gradient = torch.cat([gradient, gradient.new_zeros(missing, *gradient.shape[1:])])
    return gradient.reshape(count, -1)
