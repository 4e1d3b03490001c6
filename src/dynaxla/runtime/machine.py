"""The properties of the environment on which programs and measurements depend: versions, dynaxla's sources, and the processor."""

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
    """Returns the versions of dynaxla (whose lowerings are in a program), torch (whose kernels a program may call), jax and jaxlib."""
    return importlib.import_module("dynaxla").__version__, torch.__version__, jax.__version__, private.jaxlib_version()


@functools.cache
def sources() -> str | None:
    """Returns a hash of dynaxla's own sources; None if they are not readable files, or have changed since this module was imported."""
    root = Path(__file__).parents[1]
    digest = hashlib.blake2b(digest_size=32)
    try:
        for path in sorted(root.rglob("*.py")):
            if path.stat().st_ctime > _IMPORT_TIME:
                return None
            digest.update(f"{path.relative_to(root)} ".encode() + path.read_bytes() + b"\0")
    except OSError:
        return None
    return digest.hexdigest()


_IMPORT_TIME = time.time()


def machine_name(device: jax.Device) -> str:
    """Returns a text of the properties on which speed depends: the device, the number of threads on a CPU, and jaxlib's version."""
    if device.platform != "cpu":
        return f"{device.device_kind}, jaxlib {private.jaxlib_version()}"
    return f"{processor_name()}, {threads_of(device)} threads, jaxlib {private.jaxlib_version()}"


def processor_name() -> str:
    """Returns the processor's model name."""
    name = next((line.partition(":")[2].strip() for line in processor_facts().splitlines() if line.startswith("model name")), processor())
    return name or machine()


@functools.cache
def processor_facts() -> str:
    """Returns text that identifies the processor and its instruction set."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as file:
        kept = [line for line in file if line.startswith(("vendor_id", "model name", "flags", "Features", "CPU part"))]
        return "".join(sorted(set(kept)))
    return f"{machine()} {processor()} {torch.backends.cpu.get_cpu_capability()}"


def is_intel() -> bool:
    """True if the processor is made by Intel."""
    return "GenuineIntel" in processor_facts()


def has_wide_vectors() -> bool:
    """True if the processor has vectors of 512 bits (AVX-512)."""
    return "avx512f" in processor_facts()


def has_avx2_alone() -> bool:
    """True if the processor is an x86 with AVX2 and without AVX-512."""
    return "avx2" in processor_facts() and not has_wide_vectors()
