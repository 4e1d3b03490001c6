"""Compiles guard.cpp if necessary, and loads it into this process."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

from support.paths import ROOT

from .errors import GpuProgramsError

FOLDER = ROOT / ".gpu-programs"
SOURCE = Path(__file__).with_name("guard.cpp")


@functools.cache
def load() -> ctypes.CDLL:
    """Loads the library, whose constructors register the device. torch must not be imported earlier: it checks for CUDA only once.

    Raises: GpuProgramsError without a compiler, with a CUDA build of torch, or if torch is already imported.
    """
    if "torch" in sys.modules:
        raise GpuProgramsError("torch was imported before it could be told of a CUDA device: import commands.gpu_programs.fakes first")
    if (Path(_folder_of("torch")) / "lib" / "libtorch_cuda.so").exists():
        raise GpuProgramsError("this torch is a CUDA build and registers a CUDA device itself: install a CPU build of torch")
    return ctypes.CDLL(str(_library(FOLDER)), ctypes.RTLD_GLOBAL)


def _library(folder: Path) -> Path:
    """Returns the library for this torch and this source, which is compiled once."""
    version = importlib.metadata.version("torch")
    digest = hashlib.blake2b(SOURCE.read_bytes() + version.encode(), digest_size=8).hexdigest()
    library = folder / f"guard-{digest}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = library.with_suffix(f".{os.getpid()}")  # another process may compile it too
        _compile(temporary)
        temporary.rename(library)
    return library


def _compile(library: Path) -> None:
    """Compiles guard.cpp. Raises: GpuProgramsError without a compiler, or with the compiler's message."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise GpuProgramsError(f"no C++ compiler ({os.environ.get('CXX', 'g++')}) for {SOURCE.name}: install g++, or set CXX")
    torch = Path(_folder_of("torch"))
    includes = [torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"]
    command = [compiler, "-O0", "-shared", "-fPIC", "-std=c++20", *[f"-I{path}" for path in includes], str(SOURCE), "-o", str(library)]
    command += [f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{torch / 'lib'}"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise GpuProgramsError(f"{SOURCE.name} does not compile with {compiler}:\n{run.stderr[-2000:]}")


def _folder_of(package: str) -> str:
    """Returns the folder of a package, without importing it."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return spec.submodule_search_locations[0]
