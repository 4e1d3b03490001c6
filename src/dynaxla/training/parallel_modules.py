"""torch's modules for training on several processes (DistributedDataParallel, `fully_shard`), as a step finds them."""

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


def may_be_there() -> bool:
    """True if this process is one of a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@dataclass(frozen=True)
class ParallelModules:
    """Modules that a step can reach.

    Attributes:
        averaged: the DistributedDataParallel modules.
        sharded: the modules that `fully_shard` was called with.
    """

    averaged: Sequence[DistributedDataParallel] = ()
    sharded: Sequence[torch.nn.Module] = ()

    @classmethod
    def among(cls, objects: Iterable[Any]) -> ParallelModules:
        """Returns the modules among the objects that a step can reach; none without a process group."""
        if not may_be_there():
            return cls()
        objects = list(objects)
        return cls(data_parallel.found_in(objects), fully_sharded.found_in(objects))

    def prepare(self) -> None:
        """Puts the parameters of sharded modules into their sharded state, as between two steps, whatever has run before."""
        fully_sharded.prepare(self.sharded)

    def why_not(self) -> str:
        """Returns the reason why no program can call the collectives of these modules; "" if one can. Else they use torch's own."""
        if reason := next(filter(None, map(data_parallel.why_not, self.averaged)), ""):
            return f"a DistributedDataParallel with {reason}"
        reason = fully_sharded.why_not(self.sharded)
        return f"a module of fully_shard with {reason}" if reason else ""

    def refuse(self) -> None:
        """Raises: CaptureError for a module whose collectives cannot be recorded."""
        if reason := self.why_not():
            raise CaptureError(f"the step uses {reason}", hint="call that module outside the step, or leave fullgraph=True out")

    @contextlib.contextmanager
    def in_a_step(self) -> Iterator[None]:
        """Inside the context, the modules use functional collectives. `prepare` must have been called, and `why_not` must be ""."""
        with data_parallel.averaging(self.averaged), fully_sharded.gathering(self.sharded):
            yield


# Code that is not the step's own: an observation ignores everything that runs inside it.
HANDLERS = (*data_parallel.HANDLERS, *fully_sharded.HANDLERS)
