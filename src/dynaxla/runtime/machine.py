"""What programs and measurements depend on besides the graph: versions, and this machine."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import time
from pathlib import Path
from platform import machine, processor

import jax
import torch

from . import private
from .clients import threads_of


def versions() -> tuple[str, ...]:
    """Of all that makes a program: dynaxla, whose forms it has, torch, whose kernels it may call, jax and jaxlib."""
    return importlib.import_module("dynaxla").__version__, torch.__version__, jax.__version__, private.jaxlib_version()


@functools.cache
def sources() -> str | None:
    """A hash of dynaxla's own sources; None where they are not at hand as files, or have been changed since they were imported."""
    root = Path(__file__).parents[1]
    found = hashlib.blake2b(digest_size=32)
    try:
        for path in sorted(root.rglob("*.py")):
            if path.stat().st_ctime > _IMPORTED:
                return None
            found.update(f"{path.relative_to(root)} ".encode() + path.read_bytes() + b"\0")
    except OSError:
        return None
    return found.hexdigest()


_IMPORTED = time.time()


def machine_name(device: jax.Device) -> str:
    """What speed depends on: the device, its number of threads on a CPU, and the version of jaxlib."""
    if device.platform != "cpu":
        return f"{device.device_kind}, jaxlib {private.jaxlib_version()}"
    return f"{processor_name()}, {threads_of(device)} threads, jaxlib {private.jaxlib_version()}"


def processor_name() -> str:
    """As the processor calls itself."""
    name = next((line.partition(":")[2].strip() for line in processor_facts().splitlines() if line.startswith("model name")), processor())
    return name or machine()


@functools.cache
def processor_facts() -> str:
    """What this machine's instructions are known by."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        kept = [line for line in file if line.startswith(("vendor_id", "model name", "flags", "Features", "CPU part"))]
        return "".join(sorted(set(kept)))
    return f"{machine()} {processor()} {torch.backends.cpu.get_cpu_capability()}"


def is_intels() -> bool:
    """Whether this machine's processor is Intel's."""
    return "GenuineIntel" in processor_facts()


def has_wide_vectors() -> bool:
    """Whether this machine's processor computes with vectors of 512 bits."""
    return "avx512f" in processor_facts()


def has_avx2_alone() -> bool:
    """Whether this machine's processor is an x86 that computes with vectors of 256 bits at most."""
    return "avx2" in processor_facts() and not has_wide_vectors()
