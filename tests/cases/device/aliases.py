"""Random chains of views and writes do what they do on the CPU, and the programs find faults that are planted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cases.aliased_views import failures
from dynaxla.device import eager_mode, lazy_mode, strided_memory
from dynaxla.runtime.cache import LeastRecentlyUsed


def check_eager() -> None:
    assert list(failures(range(8), ["eager"])) == []


def check_lazy() -> None:
    assert list(failures(range(100, 106), ["lazy"])) == []


def check_compiled() -> None:
    assert list(failures([*range(200, 203), 1056], ["compiled"])) == []  # in the last, torch.compile itself exchanges conjugate bits


def _planted(patch: pytest.MonkeyPatch) -> None:
    """What is compiled until the patch is undone is not kept."""
    patch.setattr(eager_mode, "_programs", LeastRecentlyUsed(100))
    patch.setattr(lazy_mode, "_traced_ops", lazy_mode._TracedOpCache())


def check_lost_writes_are_found() -> None:
    """A write to a part of a storage changes nothing."""
    write = strided_memory.write

    def lost(array: Any, place: strided_memory.StridedView, value: Any) -> Any:
        return write(array, place, value) if place.fills(array.size * array.dtype.itemsize) else array

    with pytest.MonkeyPatch.context() as patch:
        _planted(patch)
        patch.setattr(strided_memory, "write", lost)
        for mode in ("eager", "lazy"):
            assert "after" in next(failures(range(12), [mode]))


def check_stale_views_are_found() -> None:
    """A view shows what was in the storage when it was first read."""
    finish = eager_mode._OpCall.place_operands
    first: dict[int, tuple[torch.UntypedStorage, Any]] = {}

    def stale(call: Any, *settings: Any) -> Any:
        for slot, storage in call.storages.items() if call.op is torch.ops.aten.clone.default else ():
            old = first.setdefault(storage._cdata, (storage, call.arrays[slot]))[1]
            if old is not None and (old.shape, old.dtype) == (call.arrays[slot].shape, call.arrays[slot].dtype):
                call.arrays[slot] = old
        return finish(call, *settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager_mode._OpCall, "place_operands", stale)
        assert "after" in next(failures(range(12), ["eager"]))
