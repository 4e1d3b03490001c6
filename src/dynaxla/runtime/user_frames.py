"""Which line of the user's own code is running."""

from __future__ import annotations

import os
import sys
from types import FrameType

import jax
import torch

# Files of torch, JAX and dynaxla, and code that is in no file: fx's, and the interpreter's. Then those of Python's own library.
_OTHERS = (
    *(os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), torch.__file__, jax.__file__)),
    *("<eval_with_key>", "<frozen "),
)
_LIBRARY, _INSTALLED = os.path.dirname(os.__file__) + os.sep, ("site-packages", "dist-packages")


def innermost() -> tuple[str, int, str] | None:
    """The file, line and function of the innermost frame that is not torch's, JAX's, dynaxla's or Python's; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(file := frame.f_code.co_filename):
            return file, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back
    return None


def is_users(file: str) -> bool:
    """Whether a file is none of torch's, JAX's, dynaxla's or Python's."""
    is_library = file.startswith(_LIBRARY) and not file.startswith(_INSTALLED, len(_LIBRARY))
    return not is_library and not file.startswith(_OTHERS)


def line() -> str:
    """The same as `model.py:41, in forward`; "" if there is none."""
    found = innermost()
    return f"{os.path.basename(found[0])}:{found[1]}, in {found[2]}" if found is not None else ""
