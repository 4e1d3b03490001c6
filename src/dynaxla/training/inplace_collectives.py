"""In-place collectives (`dist.all_reduce(x)`), expressed by functional collectives, which can be recorded.

Most functions here that run a collective return a pair: the outputs, and a finished `Work` object. `_all_reduce_coalesced` returns only the
`Work`. `wait_tensor` has been called, and the result is in the caller's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..runtime import private

Tensors = Sequence[torch.Tensor]

_functional = torch.ops._c10d_functional


def run_as_functional(op: Any, args: Sequence[Any]) -> Any:
    """Runs an in-place collective as functional ops, and returns its result. The caller's dispatch mode records these ops.

    Returns: NotImplemented for an op, or arguments, without a functional version.
    """
    # The first two arguments have all tensors that the collectives read or write, apart from `sparse_indices`.
    run = _FUNCTIONAL_VERSIONS.get(op._schema.name)
    if run is None or not all(_is_plain(item) for item in args[:2]):
        return NotImplemented
    return run(*args)


def _is_plain(item: Any) -> bool:
    """True if all tensors in an op's argument are strided and not complex."""
    if isinstance(item, (list, tuple)):
        return all(map(_is_plain, item))
    return not isinstance(item, torch.Tensor) or (item.layout == torch.strided and not item.is_complex())


def _all_reduce(tensors: Tensors, group: Any, reduce_op: Any, sparse_indices: Any = None, *_: Any) -> Any:
    reduction = _reduction_name(reduce_op)
    if reduction is None or sparse_indices is not None:
        return NotImplemented
    for tensor in tensors:
        tensor.copy_(_wait(_functional.all_reduce(tensor, reduction, _group_name(group))))
    return list(tensors), _done()


def _all_reduce_coalesced(tensors: Tensors, group: Any, reduce_op: Any, *_: Any) -> Any:
    reduction = _reduction_name(reduce_op)
    if reduction is None:
        return NotImplemented
    found = _functional.all_reduce_coalesced(list(tensors), reduction, _group_name(group))
    for tensor, result in zip(tensors, found, strict=True):
        tensor.copy_(_wait(result))
    return _done()


def _broadcast(tensors: Tensors, group: Any, root_rank: int, root_tensor: int, *_: Any) -> Any:
    if len(tensors) != 1 or root_tensor:
        return NotImplemented
    tensors[0].copy_(_wait(_functional.broadcast(tensors[0], root_rank, _group_name(group))))
    return list(tensors), _done()


def _all_gather_base(output: torch.Tensor, tensor: torch.Tensor, group: Any, *_: Any) -> Any:
    size, name = _size(group), _group_name(group)
    output.view(-1).copy_(_wait(_functional.all_gather_into_tensor(tensor.reshape(-1), size, name)))
    return output, _done()


def _all_gather(outputs: Sequence[Tensors], tensors: Tensors, group: Any, *_: Any) -> Any:
    size, name = _size(group), _group_name(group)
    if len(tensors) != 1 or len(outputs[0]) != size or any(output.numel() != tensors[0].numel() for output in outputs[0]):
        return NotImplemented
    parts = _wait(_functional.all_gather_into_tensor(tensors[0].reshape(-1), size, name)).chunk(size)
    for output, part in zip(outputs[0], parts, strict=True):
        output.copy_(part.view(output.shape))
    return [list(outputs[0])], _done()


def _reduce_scatter_base(output: torch.Tensor, tensor: torch.Tensor, group: Any, reduce_op: Any, *_: Any) -> Any:
    reduction = _reduction_name(reduce_op)
    if reduction is None:
        return NotImplemented
    found = _functional.reduce_scatter_tensor(tensor.reshape(-1), reduction, _size(group), _group_name(group))
    output.view(-1).copy_(_wait(found))
    return output, _done()


_FUNCTIONAL_VERSIONS: dict[str, Callable[..., Any]] = {
    "c10d::_allgather_base_": _all_gather_base,
    "c10d::_reduce_scatter_base_": _reduce_scatter_base,
    "c10d::allgather_": _all_gather,
    "c10d::allreduce_": _all_reduce,
    "c10d::allreduce_coalesced_": _all_reduce_coalesced,
    "c10d::broadcast_": _broadcast,
}
_REDUCTIONS = frozenset(("sum", "avg", "product", "min", "max", "band", "bor", "bxor"))


def _wait(tensor: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _functional.wait_tensor(tensor)
    return found


def _reduction_name(reduce_op: Any) -> str | None:
    """Returns the name that functional collectives have for a reduction; None if they do not support it."""
    name = torch.distributed.ReduceOp.RedOpType(int(reduce_op.op())).name.lower()
    return name if name in _REDUCTIONS else None


def _unboxed(group: Any) -> torch.distributed.ProcessGroup:
    return torch.distributed.ProcessGroup.unbox(group)


def _group_name(group: Any) -> str:
    return str(_unboxed(group).group_name)


def _size(group: Any) -> int:
    return int(_unboxed(group).size())


def _done() -> Any:
    """Returns a `Work` object that is finished."""
    return private.boxed_completed_work()
