"""The modules of torch's own that make a network train on several processes, as a step finds them."""

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


@dataclass(frozen=True)
class ParallelModules:
    """Attributes: averaged (DistributedDataParallel); sharded (those that `fully_shard` was called with)."""

    averaged: Sequence[DistributedDataParallel] = ()
    sharded: Sequence[torch.nn.Module] = ()

    @classmethod
    def among(cls, objects: Iterable[Any]) -> ParallelModules:
        """Those that a step can reach; none without a group of processes."""
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            return cls()
        objects = list(objects)
        return cls(data_parallel.found_in(objects), fully_sharded.found_in(objects))

    def prepare(self) -> None:
        """Parameters of sharded modules lie as they do between two steps, whatever has run before."""
        fully_sharded.prepare(self.sharded)

    def why_not(self) -> str:
        """Why a step cannot do by functional collectives what these modules do; "" if it can."""
        if reason := next(filter(None, map(data_parallel.why_not, self.averaged)), ""):
            return f"a DistributedDataParallel with {reason}"
        return f"a module of fully_shard with {reason}" if (reason := fully_sharded.why_not(self.sharded)) else ""

    def refuse(self) -> None:
        """Raises: CaptureError for a module whose collectives no program can have."""
        if reason := self.why_not():
            raise CaptureError(f"a step has {reason}", hint="leave it out, or leave fullgraph out")

    @contextlib.contextmanager
    def in_a_step(self) -> Iterator[None]:
        """Inside, they use functional collectives, which a step notes."""
        with data_parallel.averaging(self.averaged), fully_sharded.gathering(self.sharded):
            yield


# What runs inside of these is not the step's.
HANDLERS = (*data_parallel.HANDLERS, *fully_sharded.HANDLERS)
