"""PJRT clients of our own for the CPU: one for each number of threads that torch has had."""

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
    """The CPU device that programs compiled now run on: that of a PJRT client of our own, with as many threads as torch has now.

    JAX's own CPU client hands every program to another thread, which costs more than a small program itself, and only a global setting
    of the user's can tell it not to. Its pool has a thread for every core, whatever torch was told. And as long as nobody starts JAX's
    clients, JAX does not warn at every fork, as a DataLoader's workers would make it.

    Raises: ForkError in a child of a process that had used XLA.
    """
    if forks.is_cut_off():
        raise forks.cut_off()
    if Fast.make_cpu_client is not None and (own := _own_cpu_device(torch.get_num_threads())):
        return own
    return jax.local_devices(backend="cpu")[0]


def _own_cpu_device(threads: int) -> jax.Device | None:
    """The device of our client with so many threads; it is made at the first call. None where jaxlib lacks the means."""
    own = _own_clients.get(threads)
    if own is None:
        with _making:
            own = _own_clients.get(threads) or _own_clients.setdefault(threads, _make_client(threads))
        if own.device is not None:
            private_self_tests.run(own.device)
            if not (Fast.to_buffer and Fast.torch_to_capsule):
                private.gate(["make_cpu_client"], "the public way to import memory gives it to JAX's own client")
                _own_clients[threads] = own = _OwnClient(None)
    return own.device


@dataclass(frozen=True)
class _OwnClient:
    """A PJRT client of our own. Attributes: device (None: jaxlib lacks the means); threads (of its pool)."""

    device: jax.Device | None
    threads: str = ""


# By torch's number of threads.
_own_clients: dict[int, _OwnClient] = {}
# Held while a client is made, and while an environment variable is set for that.
_making = forks.lock()


def _make_client(threads: int) -> _OwnClient:
    # A client has no other argument for the size of its pool than this variable, which is read (by C) when it is made. JAX, if it made a
    # client of its own in another thread meanwhile, would find it too.
    with private.client_lock, c_environment("PJRT_NPROC", str(threads)) as value:
        client = private.make_cpu_client()
        return _OwnClient(client.local_devices()[0], value) if client is not None else _OwnClient(None)


@contextlib.contextmanager
def c_environment(name: str, value: str) -> Iterator[str]:
    """Set an environment variable for what C reads, unless the user has set it. Gives what the variable says inside.

    Other threads do not see it in `os.environ`. Only a program that another thread starts in this moment, without saying what its
    environment is to be, gets it.
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
    """Set an environment variable for a moment, unless the user has set it. Other threads see it; two do not set variables at once."""
    with _making:
        if name in os.environ:
            yield
            return
        os.environ[name] = value
        try:
            yield
        finally:
            os.environ.pop(name, None)


def virtual_devices(count: int) -> list[jax.Device]:
    """Devices for which programs are compiled, and on which none runs. Raises: ForkError; UnsupportedVersion."""
    if forks.is_cut_off():
        raise forks.cut_off()
    with _making:
        if count not in _virtual_clients:
            with private.client_lock:
                client = private.make_cpu_client(count)
            if client is None:
                raise UnsupportedVersion(
                    f"jaxlib {private.jaxlib_version()} makes no virtual devices without XLA_FLAGS",
                    hint=f"start Python with XLA_FLAGS=--xla_force_host_platform_device_count={count}, and make an ordinary mesh",
                )
            _virtual_clients[count] = client
    return _virtual_clients[count].local_devices()


# By the number of devices.
_virtual_clients: dict[int, Any] = {}


def _had_used_xla() -> bool:
    """In a child: whether there were clients of ours in the parent.

    Ours, and MLIR's pool, are never freed: that would be to wait for their threads.
    """
    devices = [own.device for own in _own_clients.values() if own.device is not None]
    for client in [*(device.client for device in devices), *_virtual_clients.values()]:
        forks.leave(client)
    if pool := private.mlir_threads():
        forks.leave(pool)
    return bool(devices or _virtual_clients)


forks.uses_xla(_had_used_xla)


def is_own(device: jax.Device) -> bool:
    """Whether a device is a client's of ours."""
    return any(device is own.device for own in list(_own_clients.values()))


def threads_of(device: jax.Device) -> str:
    """How many threads a CPU device's pool has."""
    return next((own.threads for own in list(_own_clients.values()) if device is own.device), str(os.cpu_count()))
