"""Topologies: sets of TPUs that need not exist, for which libtpu (XLA's compiler for TPUs) compiles programs on any machine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata

import jax
from jax.experimental import topologies

from .. import forks
from ..errors import ArgumentError, CompilationError, UnsupportedVersion
from . import clients

PLATFORMS = ("tpu",)
# The environment that libtpu reads when it is loaded. Without the first four variables, libtpu asks the metadata server of Google's cloud,
# which other machines do not have. Without the last variable, only one process of a machine can load libtpu at a time.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Devices for which programs can be compiled, but on which they cannot run.

    Attributes:
        platform: The devices' platform, "tpu".
        name: The topology's name, such as "v5e:2x2".
        devices: The devices.
    """

    platform: str
    name: str
    devices: tuple[jax.Device, ...]

    def __str__(self) -> str:
        return self.name


def topology(platform: str, name: str) -> Topology:
    """Returns the topology with this name.

    Args:
        platform: "tpu".
        name: The kind and the number of TPUs, as in "v5e:2x2", "v5p:2x2x1" or "v6e:16x16".

    Raises:
        ArgumentError: Another platform, or a name that libtpu does not know.
        UnsupportedVersion: libtpu is not installed, or is too old or too new for the installed jaxlib.
        CompilationError: libtpu cannot start.
        ForkError: This process was forked from one that has used XLA.

    Source: jax.experimental.topologies
    """
    if platform not in PLATFORMS:
        raise ArgumentError(f"programs cannot be compiled for a topology of the platform {platform!r}", hint='use platform="tpu"')
    if forks.has_lost_xla():
        raise forks.fork_error()
    return _tpu_topology(name)


@functools.cache
def _tpu_topology(name: str) -> Topology:
    try:
        with contextlib.ExitStack() as stack:
            for variable, value in _ENVIRONMENT.items():
                stack.enter_context(clients.c_environment(variable, value))
            found = topologies.get_topology_desc(platform="tpu", topology_name=name)
    except jax.errors.JaxRuntimeError as error:  # a subclass of RuntimeError
        if "INVALID_ARGUMENT" not in str(error):
            raise CompilationError(f"libtpu, TPU's compiler, cannot start: {error}", hint="end other processes that use libtpu") from error
        raise ArgumentError(
            f"{name!r} is no topology of TPUs: {error}", hint='a topology is a kind of TPU and the grid of its chips, such as "v5e:2x2"'
        ) from error
    except RuntimeError as error:
        raise UnsupportedVersion(
            f"JAX cannot compile for TPUs: {error}", hint=f"install TPU's compiler: pip install {_libtpu_requirement()}"
        ) from error
    _devices.update(found.devices)
    return Topology("tpu", name, tuple(found.devices))


# The devices of all topologies.
_devices: set[jax.Device] = set()


def has(device: jax.Device) -> bool:
    """True if a device belongs to a topology, so that no array can be on it."""
    return device in _devices


def _libtpu_requirement() -> str:
    """Returns the requirement for libtpu that the installed jax declares in its extra `tpu`."""
    for line in importlib.metadata.requires("jax") or ():
        requirement, _, marker = line.partition(";")
        if requirement.startswith("libtpu") and "tpu" in marker:
            return requirement.strip()
    return "'jax[tpu]'"
