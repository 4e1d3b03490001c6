"""Random chains of views and writes agree with the CPU, and the comparison finds planted faults."""

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
    assert list(failures([*range(200, 203), 1056], ["compiled"])) == []  # in program 1056, torch.compile itself exchanges conjugate bits


def _use_temporary_caches(patch: pytest.MonkeyPatch) -> None:
    """Programs that are compiled until the patch is undone, which may have the fault, are dropped then."""
    patch.setattr(eager_mode, "_programs", LeastRecentlyUsed(100))
    patch.setattr(lazy_mode, "_traced_ops", lazy_mode._TracedOpCache())


def check_lost_writes_are_found() -> None:
    """Planted fault: a write to a part of a storage changes nothing."""
    write = strided_memory.write

    def write_only_whole_storages(array: Any, view: strided_memory.StridedView, value: Any) -> Any:
        return write(array, view, value) if view.fills(array.size * array.dtype.itemsize) else array

    with pytest.MonkeyPatch.context() as patch:
        _use_temporary_caches(patch)
        patch.setattr(strided_memory, "write", write_only_whole_storages)
        for mode in ("eager", "lazy"):
            assert "after" in next(failures(range(12), [mode]))


def check_stale_views_are_found() -> None:
    """Planted fault: a view shows the values of the storage at the first read."""
    finish = eager_mode._OpCall.place_operands
    first_reads: dict[int, tuple[torch.UntypedStorage, Any]] = {}

    def place_stale_operands(call: Any, *args: Any) -> Any:
        for slot, storage in call.storages.items() if call.op is torch.ops.aten.clone.default else ():
            old = first_reads.setdefault(storage._cdata, (storage, call.arrays[slot]))[1]
            if old is not None and (old.shape, old.dtype) == (call.arrays[slot].shape, call.arrays[slot].dtype):
                call.arrays[slot] = old
        return finish(call, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(eager_mode._OpCall, "place_operands", place_stale_operands)
        assert "after" in next(failures(range(12), ["eager"]))
