"""The modules of torch's own that make a network train on several processes, as a step finds them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import CaptureError
from . import data_parallel, fully_sharded

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def may_be_there() -> bool:
    """Whether this process is one of a group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@dataclass(frozen=True)
class ParallelModules:
    """Attributes: averaged (DistributedDataParallel); sharded (those that `fully_shard` was called with); has_wrappers (whether there is a
    FullyShardedDataParallel)."""

    averaged: Sequence[DistributedDataParallel] = ()
    sharded: Sequence[torch.nn.Module] = ()
    has_wrappers: bool = False

    @classmethod
    def among(cls, objects: Iterable[Any]) -> ParallelModules:
        """Those that a step can reach; none without a group of processes."""
        if not may_be_there():
            return cls()
        objects = list(objects)
        fsdp = sys.modules.get("torch.distributed.fsdp")
        has_wrappers = fsdp is not None and any(isinstance(item, fsdp.FullyShardedDataParallel) for item in objects)
        return cls(data_parallel.found_in(objects), fully_sharded.found_in(objects), has_wrappers)

    def prepare(self) -> None:
        """Parameters of sharded modules lie as they do between two steps, whatever has run before."""
        fully_sharded.prepare(self.sharded)

    def need_eager_first(self) -> bool:
        """Whether modules free and fill the memory of their parameters, for which a first call in eager mode prepares them: torch's FSDP,
        and FSDP2 where its own hooks gather."""
        return self.has_wrappers or bool(self.why_not_gathered())

    def why_not_averaged(self) -> str:
        """Why a step that does not run in eager mode would not average gradients as these modules do; "" if it does."""
        reason = next(filter(None, map(data_parallel.why_not, self.averaged)), "")
        return f"a DistributedDataParallel with {reason}" if reason else ""

    def why_not_gathered(self) -> str:
        """Why a step has to leave the gathering of parameters to torch's own hooks; "" if it does not."""
        reason = fully_sharded.why_not(self.sharded)
        return f"a module of fully_shard with {reason}" if reason else ""

    def refuse(self) -> None:
        """Raises: CaptureError for a module whose collectives no recording can have."""
        if reason := self.why_not_averaged() or self.why_not_gathered():
            raise CaptureError(f"a step has {reason}", hint="leave it out, or leave fullgraph out")

    @contextlib.contextmanager
    def in_a_step(self) -> Iterator[None]:
        """Inside, they use functional collectives, which a step notes, where they can."""
        gathered = () if self.why_not_gathered() else self.sharded
        with data_parallel.averaging(self.averaged), fully_sharded.gathering(gathered):
            yield


# What runs inside of these is not the step's.
HANDLERS = (*data_parallel.HANDLERS, *fully_sharded.HANDLERS)
