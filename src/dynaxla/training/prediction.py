"""What an op will give, before it has run: it is run on fake tensors, which have shapes, strides and dtypes, but no values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from ..runtime.private import storage_id
from .kinds import with_tensors
from .likenesses import fake_like
from .traces import Given, New, geometry


class Unpredictable(Exception):
    """An op whose results are known only when it has run."""


def predict(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[torch.Tensor]) -> tuple[Any, int]:
    """What an op gives (New, Given for an argument, other values as they are, or a list of these), and how many of these are New.

    tensors: those among the arguments, in order. Raises: Unpredictable, also for a new tensor that is only a part of its storage.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[int, torch.Tensor] = {}
    positions: dict[int, int] = {}
    with mode:
        for position, tensor in enumerate(tensors):
            positions.setdefault(id(tensor), position)
            if id(tensor) not in fakes:
                fakes[id(tensor)] = fake_like(tensor)
    storages = {storage_id(fake) for fake in fakes.values()}
    back = {id(fake): Given(positions[key]) for key, fake in fakes.items()}
    fake_args, fake_kwargs = with_tensors((tuple(args), dict(kwargs)), lambda tensor: fakes[id(tensor)])
    try:
        with mode:
            result = op(*fake_args, **fake_kwargs)
    except Exception as error:  # torch's own kernel says what is wrong, if anything is
        raise Unpredictable from error
    if any(fakes[id(tensor)].shape != tensor.shape for tensor in tensors):
        raise Unpredictable  # what is given as `out` gets another size
    count = 0
    new: dict[int, torch.Tensor] = {}

    def leaf(value: Any) -> Any:
        nonlocal count
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in back:
            return back[id(value)]
        if id(value) in new:  # some fake implementations give one tensor for two results
            value = value.clone()
        new[id(value)] = value
        if not isinstance(value, FakeTensor) or value.layout != torch.strided or storage_id(value) in storages:
            raise Unpredictable
        storages.add(storage_id(value))
        count += 1
        if value.storage_offset() or value.is_conj() or value.is_neg():
            raise Unpredictable
        return New(geometry(value), value.device, value.untyped_storage().nbytes())

    if isinstance(result, (list, tuple)):
        return [leaf(item) for item in result], count
    return leaf(result), count
