"""DistributedDataParallel inside a step: the gradients are averaged by a collective that is recorded like any other op.

torch's own reducer is C++ code that copies gradients to and from its buckets, which cannot be recorded. Inside a step the module is
called without its reducer. At the end of each backward pass, all gradients of one dtype go through one functional all-reduce, in the order
of the parameters, which is the same on every process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..runtime import private
from ..runtime.guards import is_not_observed

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def modules_among(objects: Iterable[Any]) -> list[DistributedDataParallel]:
    """Returns the DistributedDataParallel modules among the objects, without duplicates."""
    found = {id(item): item for item in objects if isinstance(item, torch.nn.parallel.DistributedDataParallel)}
    return list(found.values())


def why_not(module: DistributedDataParallel) -> str:
    """Returns the reason why a step cannot average this module's gradients; "" if it can."""
    return private.unsupported_ddp_feature(module)


@contextlib.contextmanager
def functional_averages(modules: Iterable[DistributedDataParallel]) -> Iterator[None]:
    """Inside the context, these modules average their gradients by functional collectives, at the end of each backward pass."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(_functional_averages(module))
        yield


@contextlib.contextmanager
def _functional_averages(module: DistributedDataParallel) -> Iterator[None]:
    averager = _GradientAverager(module)
    try:
        with private.without_reducer(module, lambda buffers: _broadcast_buffers(buffers, module.process_group)):
            yield
    finally:
        averager.remove()


class _GradientAverager:
    """Averages a module's gradients at the end of each backward pass that reaches its parameters."""

    def __init__(self, module: DistributedDataParallel) -> None:
        self._module = module
        self._parameters = private.averaged_parameters(module)
        self._ready: set[int] = set()
        self._handles = [
            parameter.register_post_accumulate_grad_hook(functools.partial(self._add_ready, index=index))
            for index, (_, parameter) in enumerate(self._parameters)
        ]

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    @is_not_observed
    def _add_ready(self, _: torch.Tensor, *, index: int) -> None:
        if not self._module.require_backward_grad_sync:
            return
        if not self._ready:
            private.call_after_backward(self._end_backward)
        self._ready.add(index)

    @is_not_observed
    def _end_backward(self) -> None:
        missing = [name for index, (name, _) in enumerate(self._parameters) if index not in self._ready]
        self._ready.clear()
        if missing:
            raise RuntimeError(
                f"DistributedDataParallel: {len(missing)} parameters got no gradient in this backward pass, among them {missing[0]}; other "
                "processes may wait for it. Use all parameters in the loss, or freeze the unused ones with requires_grad_(False)"
            )
        _average_gradients([parameter for _, parameter in self._parameters], self._module.process_group)


def _average_gradients(parameters: list[torch.nn.Parameter], group: Any) -> None:
    """Replaces each parameter's gradient by its mean over the group's processes, with one collective for each dtype."""
    functional = torch.ops._c10d_functional
    with torch.no_grad():
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters:
            assert parameter.grad is not None
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in by_dtype.values():
            scaled = [gradient / group.size() for gradient in gradients]
            for gradient, total in zip(gradients, functional.all_reduce_coalesced(scaled, "sum", group.group_name), strict=True):
                gradient.copy_(functional.wait_tensor(total))


@is_not_observed
def _broadcast_buffers(buffers: Sequence[torch.Tensor], group: Any) -> None:
    """Broadcasts the buffers of rank 0 to all processes, as DistributedDataParallel does before a forward pass."""
    functional = torch.ops._c10d_functional
    with torch.no_grad():
        for buffer in buffers:
            buffer.copy_(functional.wait_tensor(functional.broadcast(buffer, 0, group.group_name)))
