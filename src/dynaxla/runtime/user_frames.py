"""Finds the line of user code that is running."""

from __future__ import annotations

import os
import sys
import warnings
from types import FrameType

import jax
import torch

# Prefixes of the files of dynaxla, torch and JAX, and the file names of generated code: torch.fx's and the interpreter's frozen modules.
_OTHERS = (
    *(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), torch.__file__, jax.__file__)),
    *("<eval_with_key>", "<frozen "),
)
# The folder of Python's standard library, and the folders of installed packages inside it.
_LIBRARY, _INSTALLED = os.path.dirname(os.__file__) + os.sep, ("site-packages", "dist-packages")


def innermost() -> tuple[str, int, str] | None:
    """Returns the file, line and function of the innermost user frame (see `is_users`); None if there is none."""
    frame = _innermost()
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _innermost() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_users(file: str) -> bool:
    """True if a file belongs to none of torch, JAX, dynaxla and Python's standard library."""
    is_library = file.startswith(_LIBRARY) and not file.startswith(_INSTALLED, len(_LIBRARY))
    return not is_library and not file.startswith(_OTHERS)


def line() -> str:
    """Returns the innermost user frame in the form `model.py:41, in forward`; "" if there is none."""
    found = innermost()
    return f"{os.path.basename(found[0])}:{found[1]}, in {found[2]}" if found is not None else ""


def deprecated(text: str) -> None:
    """Issues a DeprecationWarning at the innermost user frame, however many frames of dynaxla and torch are above it."""
    frame = _innermost()
    if frame is None:
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return
    names = frame.f_globals
    registry = names.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, DeprecationWarning, frame.f_code.co_filename, frame.f_lineno, names.get("__name__"), registry)
