"""Values that depend only on parameters and buffers of modules (option freeze). They are computed again after one of these has changed."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import forks
from ..buffers.addresses import tensor_snapshot
from ..capture.graph import OpenLayouts
from ..observe import metrics
from ..runtime import eager_fallback
from ..runtime.programs import Orders
from .executable import Executable
from .protocol import Runner


class FrozenValues:
    """A runner that computes values from parameters and buffers, and keeps the results of its last call.

    A call compares the identity, the address and the version counter of each parameter and buffer with those of the last computation. So it
    does not detect writes that leave the version counter unchanged: through `tensor.data`, through NumPy or DLPack, and to tensors made in
    inference mode.

    Args:
        prepare: The runner of the graph that computes the values.
        open_inputs: The memory orders that XLA chooses for the values when it compiles the program that reads them.
        positions: The position of each value among the inputs of that program.
    """

    def __init__(self, prepare: Runner, open_inputs: OpenLayouts, positions: Sequence[int]) -> None:
        self._boxed_call = True
        self.name = prepare.name
        self._prepare, self._open_inputs, self._positions = prepare, open_inputs, positions
        self._cached: _CachedResults | None = None
        self._lock = forks.lock()

    def __call__(self, sources: list[Any]) -> Sequence[Any]:
        if eager_fallback.is_being_traced():
            return self._prepare(sources)
        cached = self._cached
        if cached is None or not cached.is_valid_for(sources):
            if eager_fallback.is_needed(sources):
                return self._prepare(sources)
            with self._lock:
                cached = self._cached
                if cached is None or not cached.is_valid_for(sources):
                    metrics.add("preparations")
                    forget = weakref.WeakMethod(self._forget)
                    cached = self._cached = _CachedResults(sources, self._prepare, lambda _: (call := forget()) and call())
        if self._open_inputs.orders is not cached.orders:
            cached.lay_out(self._open_inputs.orders, self._positions)
        return cached.results

    def _forget(self) -> None:
        """Drops the results, when one of the parameters is freed."""
        self._cached = None

    def executables(self) -> list[Executable]:
        return self._prepare.executables()


class _CachedResults:
    """The results of a computation from some tensors, with the state of these tensors before the computation.

    The object keeps the tensors' storages alive (not the tensors themselves), so that no other tensor can be allocated at their addresses.

    Args:
        sources: The tensors.
        compute: Computes the results from a list of the tensors.
        on_free: Called when one of the tensors is freed.
    """

    def __init__(
        self, sources: Sequence[torch.Tensor], compute: Callable[[list[Any]], Sequence[Any]], on_free: Callable[[Any], object]
    ) -> None:
        # Read before the computation, so that the next call detects a write of another thread during the computation.
        self._state = tensor_snapshot(sources)
        self.results = compute(list(sources))
        self.orders: Orders | None = None
        self._storages = [source.untyped_storage() for source in sources]
        self._references = [weakref.ref(source, on_free) for source in sources]

    def is_valid_for(self, sources: Sequence[torch.Tensor]) -> bool:
        """True if the results were computed from these tensors and nothing has been written to them since."""
        return self._state == tensor_snapshot(sources)

    def lay_out(self, orders: Orders | None, positions: Sequence[int]) -> None:
        """Brings the results into the memory orders in which a program reads them.

        Args:
            orders: The memory orders by position among the program's inputs; None for row-major order.
            positions: The position of each result among the program's inputs.
        """
        self.results = [_in_order(result, (orders or {}).get(position)) for result, position in zip(self.results, positions, strict=True)]
        self.orders = orders


def _in_order(tensor: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Returns the tensor with another order of its dimensions in memory: dimension i in memory is dimension order[i]. None: unchanged."""
    if order is None:
        return tensor
    return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(len(order))])
