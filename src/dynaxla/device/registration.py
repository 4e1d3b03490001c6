"""`dynaxla.device.enable`, which registers the device "jax" with torch."""

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
from . import gradient_shardings, kernels, module_moves, pjrt_devices, storage_buffers, storage_methods, storages, torch_module

_lock = forks.lock()
_is_enabled = False


class _Hooks(private.DeviceHooks):
    """torch's hooks of a device.

    torch calls them in C++ code that does not allow exceptions. A hook that is a Python function could raise KeyboardInterrupt, since
    Python checks for signals in its functions. So the hooks are callables that are implemented in C.
    """

    is_available = is_built = itertools.repeat(True).__next__
    has_primary_context = range(1 << 8).__contains__  # the argument is a device index


# By thread identifier: the exception that `_device_types` has intercepted.
_intercepted: dict[int, BaseException | None] = {}


def _device_types() -> Iterator[Any]:
    """Yields the device type that torch's device guard reports, endlessly.

    torch's autograd asks for the device type in C++ code that does not allow exceptions. An exception in this generator would end the
    process. There are two causes of an exception:

    - A signal. Python does not check for signals in a generator that is suspended in `yield from`, so this generator always is. But
      pybind11 checks for signals before it calls the generator, which dynaxla cannot prevent: docs/device.md, "Traps".
    - A hook of autograd whose exception is propagating when torch asks. The C call behind `yield from` then fails with a SystemError. The
      generator stores the hook's exception for `_backward_in_this_thread`, and continues.
    """
    endless = map(operator.itemgetter(0), itertools.repeat((private.PRIVATEUSE1_TYPE,)))
    while True:
        try:
            yield from endless
        except SystemError as error:  # a call "returned a result with an exception set"; the error's cause is that exception
            _intercepted[threading.get_ident()] = error.__cause__


def _guard() -> Any:
    device_types = _device_types()
    next(device_types)  # enters `yield from`
    return type("Guard", (private.DeviceGuard,), {"type_": device_types.__next__})()


@contextlib.contextmanager
def _backward_in_this_thread(outputs: Any) -> Iterator[None]:
    """Runs a backward pass in the calling thread if it begins at outputs that are on the CPU and on this device only.

    At the first backward pass, torch's autograd starts a thread for each device that it knows. It has no thread for this device.

    Raises: the exception that `_device_types` intercepted.
    """
    has_other_devices = any(isinstance(output, torch.Tensor) and output.device.type not in ("cpu", storages.NAME) for output in outputs)
    intercepted = None
    with contextlib.nullcontext() if has_other_devices else torch.autograd.set_multithreading_enabled(False):
        try:
            yield
        except SystemError:
            intercepted = _intercepted.pop(threading.get_ident(), None)
            if intercepted is None:
                raise
    if intercepted is not None:
        raise intercepted
    gradient_shardings.reshard_all()


def enable() -> None:
    """Registers the device "jax": tensors in XLA's memory, on the devices of JAX's default backend ("jax:0", "jax:1", ...).

    The registration lasts until the process ends. It takes torch's only spare device type (PrivateUse1), which gets this name.
    docs/device.md describes the effects on other code. A second call does nothing.

    Raises: RuntimeError if another library has taken the spare device; UnsupportedVersion; ForkError.
    """
    global _is_enabled
    with _lock:
        if _is_enabled:
            return
        if forks.has_lost_xla():
            raise forks.fork_error()
        name = private.privateuse1_name()
        if name != "privateuseone":
            raise RuntimeError(
                f'the device "jax" needs the one device name that torch leaves to libraries, and another library uses it as "{name}"'
            )
        if not private.HAS_EMPTY_STORAGES:
            raise UnsupportedVersion(
                f"torch {torch.__version__} cannot make storages without memory, which the device jax needs",
                hint="install torch 2.13 or newer; torch.compile of models on the CPU and on GPUs works with this torch",
            )
        pjrt_devices.devices()
        registry.fill()  # the lowerings are imported here rather than while an op runs
        private.register_device(storages.NAME, sys.modules[torch_module.__name__], _Hooks(), _guard())
        storage_methods.install()
        module_moves.install()
        kernels.register()
        devices.register(storages.NAME, pjrt_devices.jax_device)
        device_kinds.register(storages.NAME, storage_buffers)
        if not private.wrap_backward(_backward_in_this_thread):
            raise UnsupportedVersion(
                f'torch {torch.__version__} runs backward passes in a way that the device "jax" does not support',
                hint="install another release of torch: README names the tested releases",
            )
        _is_enabled = True
