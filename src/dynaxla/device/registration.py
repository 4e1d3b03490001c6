"""`dynaxla.enable_device`: torch learns of the device "jax". Nothing else in dynaxla registers anything."""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch

from .. import forks
from ..buffers import device_kinds
from ..errors import UnsupportedVersion
from ..lowering import registry
from ..runtime import devices, private
from . import gradient_shardings, in_storages, kernels, module, moves, places, storage_methods, storages

_lock = forks.lock()
_enabled: list[bool] = []


class _Hooks(private.DeviceHooks):
    """torch asks these where C++ allows no exception, and functions of Python's are where Ctrl-C is noticed: so they are none."""

    is_available = is_built = itertools.repeat(True).__next__
    has_primary_context = range(1 << 8).__contains__  # of the index of a device


# By thread: the exception that `_kinds` has met.
_met: dict[int, BaseException | None] = {}


def _kinds() -> Iterator[Any]:
    """The kind of device that the guard is for, for ever.

    torch's autograd asks for it where C++ allows no exception, also while one of a hook's is on its way through. An exception then ends
    the process. So what it asks is a generator in `yield from`, where Python looks at no signals; and a call inside of it, by which Python
    notices an exception that is on its way: it is kept here for `_in_this_thread`. pybind11 looks at signals before it asks, which nothing
    here can prevent: docs/device.md, "Traps".
    """
    always = map(operator.itemgetter(0), itertools.repeat((private.SPARE_KIND,)))
    while True:
        try:
            yield from always
        except SystemError as error:  # a call "returned a result with an exception set", which is its cause
            _met[threading.get_ident()] = error.__cause__


def _guard() -> Any:
    kinds = _kinds()
    next(kinds)
    return type("Guard", (private.DeviceGuard,), {"type_": kinds.__next__})()


@contextlib.contextmanager
def _in_this_thread(outputs: Any) -> Iterator[None]:
    """torch's autograd gives each device that it knew at the first backward pass a thread, and has none for ours. Where only the CPU and
    this device take part, the calling thread does it all, as for the CPU alone.

    Raises: what `_kinds` has met on its way to the caller.
    """
    elsewhere = any(isinstance(output, torch.Tensor) and output.device.type not in ("cpu", storages.NAME) for output in outputs)
    met = None
    with contextlib.nullcontext() if elsewhere else torch.autograd.set_multithreading_enabled(False):
        try:
            yield
        except SystemError:
            met = _met.pop(threading.get_ident(), None)
            if met is None:
                raise
    if met is not None:
        raise met
    gradient_shardings.follow_all()


def enable_device() -> None:
    """Make `torch.device("jax")` work: tensors that live in XLA, on the devices of JAX's default backend ("jax:0", "jax:1", ...).

    It holds for the whole process and for its life: torch has one spare device, which gets this name. docs/device.md says what others see
    of it. A second call does nothing.

    Raises: RuntimeError if another library has taken the spare device; UnsupportedVersion; ForkError.
    """
    with _lock:
        if _enabled:
            return
        if forks.is_cut_off():
            raise forks.cut_off()
        name = private.spare_device_name()
        if name != "privateuseone":
            raise RuntimeError(f'torch has one spare device, and another library has named it "{name}": the device "jax" needs it')
        if not private.HAS_EMPTY_STORAGES:
            raise UnsupportedVersion(f"torch {torch.__version__} cannot make storages without memory, which the device jax needs")
        places.devices()
        registry.fill()  # now, and not while an op runs
        private.register_device(storages.NAME, sys.modules[module.__name__], _Hooks(), _guard())
        storage_methods.install()
        moves.install()
        kernels.register()
        devices.register(storages.NAME, places.jax_device)
        device_kinds.register(storages.NAME, in_storages)
        if not private.before_backward(_in_this_thread):
            raise UnsupportedVersion(f"torch {torch.__version__} runs backward passes in another way, which the device jax needs to know")
        _enabled.append(True)
