"""The folder of libtpu, and the environment of a process that compiles with it."""

from __future__ import annotations

import os
from importlib.metadata import requires
from pathlib import Path

from support.paths import ROOT, TESTS

FOLDER = ROOT / ".tpu-programs"


class LibtpuError(Exception):
    """libtpu is missing. The message says how to fix it."""


def requirement() -> str:
    """Returns the requirement for libtpu of the installed jax's extra `tpu`, such as "libtpu==0.0.42.*"."""
    return next(line.partition(";")[0].strip() for line in requires("jax") or () if line.startswith("libtpu") and "tpu" in line)


def folder() -> Path:
    """Returns the folder into which `make tpu-programs` installs libtpu for this jax."""
    return FOLDER / requirement().replace("==", "-").replace(".*", "")


def version(libtpu: Path) -> str:
    """Returns the version of the libtpu in a folder."""
    return next(path.name.removesuffix(".dist-info").split("-")[1] for path in libtpu.glob("libtpu-*.dist-info"))


def environment(libtpu: Path) -> dict[str, str]:
    """Returns the environment variables of a process that compiles. Raises: LibtpuError."""
    library = libtpu / "libtpu" / "libtpu.so"
    if not library.is_file():
        raise LibtpuError(f"there is no libtpu in {libtpu}: `make tpu-programs` installs it, or give --libtpu FOLDER")
    paths = [str(TESTS), str(TESTS.parent / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    added = {"TPU_LIBRARY_PATH": str(library), "JAX_PLATFORMS": "cpu", "DYNAXLA_CACHE": "", "PYTHONPATH": os.pathsep.join(paths)}
    # libtpu refuses to be loaded by two processes at a time, since only one can use a TPU. These processes use none.
    added["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
    return {**os.environ, **added, "TPU_MIN_LOG_LEVEL": "3", "TF_CPP_MIN_LOG_LEVEL": "3"}
