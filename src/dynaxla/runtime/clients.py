"""dynaxla's own PJRT clients for the CPU: one for each number of threads that torch has used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import torch

from .. import forks
from ..errors import UnsupportedVersion
from . import private, private_self_tests
from .private import Fast


def cpu_device() -> jax.Device:
    """Returns the CPU device on which programs compiled now run: that of dynaxla's own PJRT client with as many threads as torch has now.

    dynaxla does not use JAX's own CPU client. That client dispatches every program to another thread, which costs more than a small program
    itself and can only be disabled by a global setting of the user's. Its pool has one thread per core, whatever torch's setting is. And
    once one of JAX's own clients is started, JAX warns at every fork, such as those of a DataLoader's workers.

    Raises: ForkError in a child of a process that had used XLA.
    """
    if forks.has_lost_xla():
        raise forks.fork_error()
    if Fast.make_cpu_client is not None and (own := _own_cpu_device(torch.get_num_threads())):
        return own
    return jax.local_devices(backend="cpu")[0]


def _own_cpu_device(threads: int) -> jax.Device | None:
    """Returns the device of the client with this number of threads, creating it at the first call. None if jaxlib does not support this."""
    own = _own_clients.get(threads)
    if own is None:
        with _creation_lock:
            own = _own_clients.get(threads) or _own_clients.setdefault(threads, _make_client(threads))
        if own.device is not None:
            private_self_tests.run(own.device)
            if not (Fast.to_buffer and Fast.torch_to_capsule):
                private.gate(["make_cpu_client"], "the public way to import memory gives it to JAX's own client")
                _own_clients[threads] = own = _OwnClient(None)
    return own.device


@dataclass(frozen=True)
class _OwnClient:
    """A PJRT client of dynaxla.

    Attributes:
        device: Its device; None if jaxlib does not support such clients.
        threads: The number of threads in its pool.
    """

    device: jax.Device | None
    threads: str = ""


# Keyed by torch's number of threads.
_own_clients: dict[int, _OwnClient] = {}
# Held while a client is created, and while an environment variable is set for that.
_creation_lock = forks.lock()


def _make_client(threads: int) -> _OwnClient:
    # The size of a client's pool can only be set by this variable, which C code reads when it creates the client. The lock keeps JAX from
    # creating its own client in another thread meanwhile, which would also read the variable.
    with private.client_lock, c_environment("PJRT_NPROC", str(threads)) as value:
        client = private.make_cpu_client()
        return _OwnClient(client.local_devices()[0], value) if client is not None else _OwnClient(None)


@contextlib.contextmanager
def c_environment(name: str, value: str) -> Iterator[str]:
    """Sets an environment variable for C code inside the context, unless the user has set it. Yields the variable's value there.

    Other threads do not see it in `os.environ`. Only a subprocess that another thread starts meanwhile without an explicit environment
    inherits it.
    """
    if name in os.environ:
        yield os.environ[name]
        return
    os.putenv(name, value)
    try:
        yield value
    finally:
        os.unsetenv(name)


@contextlib.contextmanager
def environment(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable inside the context, unless the user has set it. Other threads see it; only one thread sets variables at
    a time."""
    with _creation_lock:
        if name in os.environ:
            yield
            return
        os.environ[name] = value
        try:
            yield
        finally:
            os.environ.pop(name, None)


def virtual_devices(count: int) -> list[jax.Device]:
    """Returns devices for which programs are compiled but never run. Raises: ForkError; UnsupportedVersion."""
    if forks.has_lost_xla():
        raise forks.fork_error()
    with _creation_lock:
        if count not in _virtual_clients:
            with private.client_lock:
                client = private.make_cpu_client(count)
            if client is None:
                raise UnsupportedVersion(
                    f"jaxlib {private.jaxlib_version()} cannot create virtual devices without XLA_FLAGS",
                    hint=f"start Python with XLA_FLAGS=--xla_force_host_platform_device_count={count}, and create an ordinary mesh",
                )
            _virtual_clients[count] = client
    return _virtual_clients[count].local_devices()


# Keyed by the number of devices.
_virtual_clients: dict[int, Any] = {}


def _had_used_xla() -> bool:
    """In a forked child: true if the parent had clients of dynaxla.

    The child never frees these clients or MLIR's thread pool, because it would wait for threads that it does not have.
    """
    devices = [own.device for own in _own_clients.values() if own.device is not None]
    for client in [*(device.client for device in devices), *_virtual_clients.values()]:
        forks.leak(client)
    if pool := private.mlir_threads():
        forks.leak(pool)
    return bool(devices or _virtual_clients)


forks.register_xla_use(_had_used_xla)


def is_own(device: jax.Device) -> bool:
    """True if the device belongs to one of dynaxla's own clients."""
    return any(device is own.device for own in list(_own_clients.values()))


def threads_of(device: jax.Device) -> str:
    """Returns the number of threads in a CPU device's pool, as text."""
    return next((own.threads for own in list(_own_clients.values()) if device is own.device), str(os.cpu_count()))
