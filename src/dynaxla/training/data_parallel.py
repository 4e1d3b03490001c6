"""DistributedDataParallel inside a step: its gradients are averaged by a collective that the step notes like any other op.

torch's own reducer is C++ that copies gradients between their memory and its buckets, which a step that waits does not have yet. Inside a
step the module is called as it is, and at the end of each backward pass all gradients go through one functional all-reduce, in the order of
the parameters, on every process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..runtime import private

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def is_there() -> bool:
    """Whether this process can have such modules."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def found_in(objects: Iterable[Any]) -> list[DistributedDataParallel]:
    """Those modules among them, each once."""
    found = {id(item): item for item in objects if isinstance(item, torch.nn.parallel.DistributedDataParallel)}
    return list(found.values())


def why_not(module: DistributedDataParallel) -> str:
    """Why a step cannot average this module's gradients; "" if it can."""
    return private.why_not_averaged(module)


@contextlib.contextmanager
def averaging(modules: Iterable[DistributedDataParallel]) -> Iterator[None]:
    """Inside, these modules average their gradients by functional collectives, at the end of a backward pass."""
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(_averaging(module))
        yield


@contextlib.contextmanager
def _averaging(module: DistributedDataParallel) -> Iterator[None]:
    parameters = private.averaged_parameters(module)
    arrived: set[int] = set()

    def arrive(_: torch.Tensor, *, index: int) -> None:
        if not module.require_backward_grad_sync:
            return
        if not arrived:
            private.at_end_of_backward(finish)
        arrived.add(index)

    def finish() -> None:
        missing = [name for index, (name, _) in enumerate(parameters) if index not in arrived]
        arrived.clear()
        if missing:
            raise RuntimeError(
                f"DistributedDataParallel: {len(missing)} parameters got no gradient in this backward pass, among them {missing[0]}; other "
                "processes may wait for it. Use all of them in the loss, or freeze those that it does not use (requires_grad_(False))"
            )
        _average([parameter for _, parameter in parameters], module.process_group)

    handles = [
        parameter.register_post_accumulate_grad_hook(functools.partial(arrive, index=index))
        for index, (_, parameter) in enumerate(parameters)
    ]
    try:
        with private.without_reducer(module, lambda buffers: _share_buffers(buffers, module.process_group)):
            yield
    finally:
        for handle in handles:
            handle.remove()


def _average(parameters: list[torch.nn.Parameter], group: Any) -> None:
    """Give each parameter the mean of its gradients over the group's processes: one collective for each dtype."""
    from torch.distributed import _functional_collectives as functional

    with torch.no_grad():
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        for parameter in parameters:
            assert parameter.grad is not None
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
        for gradients in by_dtype.values():
            shares = [gradient / group.size() for gradient in gradients]
            for gradient, total in zip(gradients, functional.all_reduce_coalesced(shares, "sum", group), strict=True):
                gradient.copy_(total)


def _share_buffers(buffers: Sequence[torch.Tensor], group: Any) -> None:
    """Give all processes the buffers of the first one, as the module does before a forward pass."""
    from torch.distributed import _functional_collectives as functional

    with torch.no_grad():
        for buffer in buffers:
            buffer.copy_(functional.broadcast(buffer, 0, group))
