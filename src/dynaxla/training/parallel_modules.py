"""torch's modules for training on several processes (DistributedDataParallel, `fully_shard`) that a step can reach."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CaptureError
from . import data_parallel, fully_sharded

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def in_process_group() -> bool:
    """True if this process belongs to a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@dataclass(frozen=True)
class ParallelModules:
    """The modules of torch.distributed that a step can reach.

    Attributes:
        averaged: the DistributedDataParallel modules.
        sharded: the modules that `fully_shard` was called with.
    """

    averaged: Sequence[DistributedDataParallel] = ()
    sharded: Sequence[torch.nn.Module] = ()

    @classmethod
    def among(cls, objects: Iterable[Any]) -> ParallelModules:
        """Returns the modules of torch.distributed among the objects that a step can reach; without a process group, no modules."""
        if not in_process_group():
            return cls()
        objects = list(objects)
        return cls(data_parallel.modules_among(objects), fully_sharded.modules_among(objects))

    def prepare(self) -> None:
        """Puts the parameters of sharded modules into their sharded state. This is their state between two steps."""
        fully_sharded.prepare(self.sharded)

    def why_not(self) -> str:
        """Returns the reason why a program cannot call the collectives of these modules; "" if it can.

        With a reason, the modules use torch's own collectives, and the step runs in eager mode.
        """
        if reason := next(filter(None, map(data_parallel.why_not, self.averaged)), ""):
            return f"a DistributedDataParallel with {reason}"
        reason = fully_sharded.why_not(self.sharded)
        return f"a module of fully_shard with {reason}" if reason else ""

    def refuse(self) -> None:
        """Raises: CaptureError for a module whose collectives cannot be recorded."""
        if reason := self.why_not():
            raise CaptureError(
                f"the step cannot be one program: it uses {reason}", hint="call that module outside the step, or leave fullgraph=True out"
            )

    @contextlib.contextmanager
    def functional_collectives(self) -> Iterator[None]:
        """Inside the context, the modules use functional collectives. `prepare` must have been called, and `why_not` must be ""."""
        with data_parallel.functional_averages(self.averaged), fully_sharded.functional_collectives(self.sharded):
            yield
