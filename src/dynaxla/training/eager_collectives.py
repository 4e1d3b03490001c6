"""The collectives of a step in eager mode: the same calls as in a program of the step.

If several processes train together, one process may run a step in eager mode, because the step prints or has a batch of another size. At
the same time another process may replay a program. The collectives of these processes have to match in type, order and contents. So in
eager mode, too, the modules of torch.distributed use the functional collectives of a program (parallel_modules.py). Each collective is
compared with those of the other processes (runtime/collective_agreement.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..guards.dispatch import has_own_dispatch
from ..lowering.asynchronous import COLLECTIVES
from ..lowering.ops import collectives
from ..runtime.guards import is_not_observed
from . import inplace_collectives
from .parallel_modules import ParallelModules


@contextlib.contextmanager
def program_collectives(modules: ParallelModules) -> Iterator[None]:
    """Inside the context, in this thread, modules and `torch.distributed` call the collectives that a program of the step calls.

    If one module's collectives cannot be part of a program (`ParallelModules.why_not`), all modules use torch's own collectives, on every
    process alike.
    """
    modules.prepare()
    if modules.why_not():
        yield
        return
    with torch.autograd.set_multithreading_enabled(False), modules.functional_collectives(), _CollectivesMode():
        yield


class _CollectivesMode(TorchDispatchMode):
    @is_not_observed
    def __torch_dispatch__(self, op: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        if any(map(has_own_dispatch, types)):
            return NotImplemented  # the class runs the op on its inner tensors, and those calls arrive here
        if op.namespace == "c10d":
            with self:
                found = inplace_collectives.run_as_functional(op, args)
            if found is not NotImplemented:
                return found
        if isinstance(op, torch._ops.OpOverload) and op._schema.name in COLLECTIVES:
            return collectives.run_eagerly(op, args, kwargs or {})
        return op(*args, **(kwargs or {}))
