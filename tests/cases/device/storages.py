"""Each access to a tensor's storage works or raises. None ends the process."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import jax
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import dynaxla
from dynaxla.device import storages


def _tensor() -> torch.Tensor:
    return torch.arange(6.0).reshape(2, 3).to("jax")


def check_deepcopied_tensors_share_memory() -> None:
    x = _tensor()
    copied = copy.deepcopy({"whole": x, "row": x[0]})
    copied["row"].fill_(9)
    assert copied["whole"].tolist() == [[9, 9, 9], [3, 4, 5]]
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]


def check_saved_files() -> None:
    x = _tensor()
    for settings in ({}, {"_use_new_zipfile_serialization": False}):
        file = io.BytesIO()
        torch.save({"x": x, "row": x[1], "p": torch.nn.Parameter(x)}, file, **settings)
        for map_location, device in ((None, "jax:0"), ("cpu", "cpu")):
            file.seek(0)
            loaded = torch.load(file, map_location=map_location)
            assert {str(tensor.device) for tensor in loaded.values()} == {device}
            loaded["row"].fill_(7)
            assert loaded["x"].tolist() == [[0, 1, 2], [7, 7, 7]]
            assert isinstance(loaded["p"], torch.nn.Parameter)
    file = io.BytesIO()
    torch.save(torch.ones(3), file)
    file.seek(0)
    assert torch.load(file, map_location="jax").device.type == "jax"
    assert pickle.loads(pickle.dumps(x)).tolist() == x.tolist()


def check_untyped_storages() -> None:
    storage = torch.UntypedStorage(4, device="jax")
    assert (storage.nbytes(), storage.tolist(), str(storage.device)) == (4, [0] * 4, "jax:0")
    storage.fill_(3)
    storage[1] = 5
    assert (storage.tolist(), storage[1], bytes(storage), list(storage)) == ([3, 5, 3, 3], 5, b"\x03\x05\x03\x03", [3, 5, 3, 3])
    assert storage.cpu().tolist() == [3, 5, 3, 3]
    other = storage.clone()
    other.copy_(torch.ones(1).untyped_storage())
    assert (other.tolist(), storage.tolist()) == (torch.ones(1).untyped_storage().tolist(), [3, 5, 3, 3])
    host = torch.UntypedStorage(4)
    host.copy_(storage)
    assert host.tolist() == [3, 5, 3, 3]
    assert storage.new().nbytes() == torch.UntypedStorage(device="jax").nbytes() == 0
    assert storage.data_ptr() == storage._cdata != other.data_ptr()
    assert not storage.is_shared()
    assert "jax:0" in repr(storage)
    assert torch.TypedStorage(4, dtype=torch.float32, device="jax", _internal=True)._size() == 4


def check_refused_operations() -> None:
    x, ordinary = _tensor(), torch.ones(6).untyped_storage()
    storage = x.untyped_storage()
    operations: list[Callable[[], Any]] = [
        lambda: storage._share_fd_cpu_(), lambda: storage._share_filename_cpu_(), lambda: storage.share_memory_(), x.share_memory_,
        lambda: storage.resize_(100), lambda: storage.byteswap(torch.float32), lambda: storage._swap_data_ptr_(ordinary),
        lambda: ordinary._swap_data_ptr_(storage), lambda: storage.pin_memory(), lambda: storage[0:2], lambda: ForkingPickler.dumps(x),
        lambda: ForkingPickler.dumps(storage), lambda: torch.UntypedStorage([1, 2], device="jax"), x.data_ptr, x.__dlpack__,
        x.__dlpack_device__, lambda: torch.from_dlpack(x), lambda: np.from_dlpack(x), lambda: jax.dlpack.from_dlpack(x),
        x.pin_memory, x.numpy, lambda: np.asarray(x), lambda: memoryview(storage), lambda: x.set_(torch.ones(2)),
        lambda: torch.ones(2).set_(x), lambda: x.set_(storage, 0, (100,), (1,)), x.to_sparse, lambda: x.to_mkldnn(),
        lambda: torch.empty(-1, device="jax"), lambda: torch.empty(2, dtype=torch.complex32, device="jax"),
        lambda: torch.empty(2, dtype=torch.qint8, device="jax"), lambda: torch.Generator(device="jax"),
        lambda: torch.empty(2, device="jax:99"), lambda: torch.empty(2, device="meta").to("jax"),
        lambda: torch.empty(2, device="jax", pin_memory=True),
    ]  # fmt: skip
    for operation in operations:
        with pytest.raises((RuntimeError, TypeError, ValueError, NotImplementedError, AssertionError, BufferError)):
            operation()
    assert x.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert ordinary.tolist() == torch.ones(6).untyped_storage().tolist()


def check_a_storage_keeps_its_array() -> None:
    x = _tensor()
    watched = weakref.ref(storages.array_of(x.untyped_storage()))
    gc.collect()
    assert watched() is not None
    view = x.detach()[1]
    del x
    gc.collect()
    assert view.tolist() == [3, 4, 5]
    del view
    gc.collect()
    assert watched() is None


def check_resize_and_set() -> None:
    x = torch.arange(3.0).to("jax")
    assert x.resize_(5).tolist() == [0, 1, 2, 0, 0]
    assert x.resize_(2).tolist() == [0, 1]
    view = x.view(-1)
    with pytest.raises(RuntimeError, match="share its storage"):
        x.resize_(50)
    assert view.tolist() == x.tolist() == [0, 1]
    y = torch.zeros(1, device="jax")
    y.data = x
    y.add_(1)
    assert x.tolist() == [1, 2]
    assert y.set_().shape == (0,)
    y.set_(x)
    y.zero_()
    assert x.tolist() == [0, 0]
    assert torch.empty_strided((2, 3), (1, 2), device="jax").stride() == (1, 2)
    assert torch.empty(2, 3, 4, 5, device="jax", memory_format=torch.channels_last).stride() == (60, 1, 15, 3)
    transposed = torch.arange(24).view(2, 3, 4).transpose(0, 2).to("jax")
    assert transposed.stride() == (1, 4, 12)
    assert transposed.tolist() == torch.arange(24).view(2, 3, 4).transpose(0, 2).tolist()


def check_foreign_memory_is_refused() -> None:
    tensor = torch.empty(0, device="jax")
    storage = torch._C._construct_storage_from_data_pointer(0, torch.device("jax:0"), 8)
    tensor.set_(storage, 0, (2,), (1,))
    with pytest.raises(RuntimeError, match=r"has no jax\.Array"):
        tensor.cpu()


def check_torch_without_the_device() -> None:
    """Data loaders, pinned memory and other backends work as without the device."""
    assert next(iter(DataLoader([torch.ones(2)] * 2, batch_size=2, pin_memory=True))).tolist() == [[1, 1], [1, 1]]
    assert next(iter(DataLoader([_tensor()[0], _tensor()[1]], batch_size=2))).tolist() == [[0, 1, 2], [3, 4, 5]]
    assert torch.ones(2).pin_memory().tolist() == [1, 1]
    for backend in ("eager", "aot_eager", "dynaxla"):
        assert torch.compile(lambda x: x * 2 + 1, backend=backend)(torch.ones(2)).tolist() == [3, 3]
        assert torch.compile(lambda x: x * 2 + 1, backend=backend)(_tensor()).tolist() == [[1, 3, 5], [7, 9, 11]]
    assert str(torch.accelerator.current_accelerator()) == "jax"
    dynaxla.device.enable()


def check_random_numbers() -> None:
    def draw() -> list[float]:
        return torch.rand(3, device="jax").tolist()

    torch.manual_seed(1)
    first, second = draw(), draw()
    torch.manual_seed(1)
    assert first == draw() != second
    state = torch.jax.get_rng_state()
    third = draw()
    torch.jax.set_rng_state(state)
    assert draw() == third
    with torch.random.fork_rng(devices=[0], device_type="jax"):
        inside = draw()
    assert draw() == inside
    torch.jax.manual_seed(5)
    fifth = draw()
    torch.jax.manual_seed_all(5)
    assert draw() == fifth
    host = torch.get_rng_state()
    draw()
    assert torch.equal(host, torch.get_rng_state())
    generated = [torch.randn(2, device="jax", generator=torch.Generator().manual_seed(3)).tolist() for _ in range(2)]
    assert generated[0] == generated[1]
    for draw_numbers in (
        lambda: torch.randint(10, (50,), device="jax"), lambda: torch.randint_like(torch.ones(50, device="jax"), 2, 10),
        lambda: torch.ones(50, device="jax").random_(3, 10),
    ):  # fmt: skip
        numbers = draw_numbers()
        assert numbers.unique().numel() > 5
        assert numbers.max() < 10
    dropped = torch.nn.functional.dropout(torch.ones(1000, device="jax"))
    assert 300 < int((dropped == 0).sum()) < 700


def check_device_module() -> None:
    assert torch.jax.is_available()
    assert torch.jax.device_count() >= 1
    assert torch.jax.current_device() == 0
    before = torch.jax.memory_allocated()
    large = torch.ones(1 << 16, device="jax")
    torch.jax.synchronize()
    assert torch.jax.memory_allocated() >= before + large.nbytes
    assert "cpu" in torch.jax.get_device_name()
    assert large.is_jax
    assert torch.ones(2).jax().device == torch.device("jax:0")
    with torch.device("jax"):
        assert torch.zeros(2).device.type == "jax"
    with pytest.raises(RuntimeError, match="jax:9"):
        torch.jax.set_device(9)
    with pytest.raises(ValueError, match="cpu"):
        torch.jax.set_device("cpu")
