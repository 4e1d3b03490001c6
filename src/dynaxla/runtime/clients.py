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
    """Returns the CPU device for programs that are compiled now: the device of dynaxla's own PJRT client with as many threads as torch has.

    dynaxla does not use JAX's own CPU client, for three reasons. That client hands every program to another thread, which takes longer than
    a small program itself, and which only a global setting of the user's can disable. Its pool has one thread per core, whatever torch's
    setting is. And once JAX has started one of its own clients, JAX warns at every fork, such as those of a DataLoader's workers.

    If jaxlib does not support clients like dynaxla's, the device is that of JAX's own CPU client.

    Raises: ForkError in a child of a process that had used XLA.
    """
    if forks.has_lost_xla():
        raise forks.fork_error()
    if Fast.make_cpu_client is not None and (own := _own_cpu_device(torch.get_num_threads())):
        return own
    return jax.local_devices(backend="cpu")[0]


def _own_cpu_device(threads: int) -> jax.Device | None:
    """Returns the device of the client with this number of threads, which the first call creates; None if jaxlib does not support it."""
    own = _own_clients.get(threads)
    if own is None:
        with _creation_lock:
            own = _own_clients.get(threads) or _own_clients.setdefault(threads, _make_client(threads))
        if own.device is not None:
            private_self_tests.run(own.device)
            if not (Fast.to_buffer and Fast.torch_to_capsule):
                private.gate(["make_cpu_client"], "the public function imports torch's memory only to JAX's own client")
                _own_clients[threads] = own = _OwnClient(None)
    return own.device


@dataclass(frozen=True)
class _OwnClient:
    """A PJRT client of dynaxla.

    Attributes:
        device: The client's device; None if jaxlib does not support such clients.
        threads: The number of threads in the client's pool, as text (PJRT_NPROC).
    """

    device: jax.Device | None
    threads: str = ""


# Keyed by torch's number of threads.
_own_clients: dict[int, _OwnClient] = {}
# Held while a client is created, and while an environment variable is set for the creation.
_creation_lock = forks.lock()


def _make_client(threads: int) -> _OwnClient:
    # Only this environment variable sets the size of a client's pool. C++ code reads the variable when it creates the client. The lock
    # stops other threads from creating JAX's own client meanwhile, whose pool would get this size, too.
    with private.client_lock, c_environment("PJRT_NPROC", str(threads)) as value:
        client = private.make_cpu_client()
        return _OwnClient(client.local_devices()[0], value) if client is not None else _OwnClient(None)


@contextlib.contextmanager
def c_environment(name: str, value: str) -> Iterator[str]:
    """Sets an environment variable inside the context for C code only, unless the user has set it. Yields the variable's value.

    `os.environ` is unchanged, so Python code does not see the variable. But a subprocess that another thread starts meanwhile inherits the
    variable, unless that thread passes an explicit environment.
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
    """Sets an environment variable inside the context, unless the user has set it.

    Other threads see the variable in `os.environ`. A lock allows only one thread at a time inside such a context.
    """
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
    """Returns this many CPU devices of one client, for which programs are compiled but never run. Raises: ForkError; UnsupportedVersion."""
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
    """In a forked child: returns true if the parent had clients of dynaxla. Leaks these clients, and MLIR's thread pool.

    If the child freed them, it would wait forever for their threads, which a fork does not copy.
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
    """Returns the number of threads in the pool of a CPU device's client, as text."""
    return next((own.threads for own in list(_own_clients.values()) if device is own.device), str(os.cpu_count()))
