"""Finds frames and lines of user code."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import warnings
from types import FrameType, TracebackType
from typing import TypeVar

# The file names of generated code: torch.fx's, and the interpreter's frozen modules.
_GENERATED = ("<eval_with_key>", "<frozen ")
# The folder of Python's standard library, and the folders of installed packages inside it.
_LIBRARY, _INSTALLED = os.path.dirname(os.__file__) + os.sep, ("site-packages", "dist-packages")

Error = TypeVar("Error", bound=BaseException)


@functools.cache
def _others() -> tuple[str, ...]:
    """Returns the prefixes of file names of dynaxla, torch and JAX, and of generated code. Neither torch nor JAX is imported."""
    specs = [importlib.util.find_spec(name) for name in ("torch", "jax", "jaxlib")]
    files = [__file__, *(spec.origin for spec in specs if spec is not None and spec.origin is not None)]
    return *(os.path.dirname(file) + os.sep for file in files), *_GENERATED


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
    return not is_library and not file.startswith(_others())


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


def is_verbose() -> bool:
    """True if the user wants full tracebacks: torch's own setting, with the variable TORCHDYNAMO_VERBOSE."""
    from torch._dynamo import config

    return bool(config.verbose)


def shortened(error: Error) -> Error:
    """Returns the exception with only the user's frames and the innermost frame of its traceback; see `is_verbose`."""
    from torch.compiler import disable

    # torch handles errors of a call while TorchDynamo still looks at each new frame, and refuses generators.
    return error if is_verbose() else disable(_shortened)(error)


def _shortened(error: Error) -> Error:
    links: list[TracebackType] = []
    link = error.__traceback__
    while link is not None:
        links.append(link)
        link = link.tb_next
    kept: TracebackType | None = None
    for link in reversed(links):
        if kept is None or is_users(link.tb_frame.f_code.co_filename):
            kept = TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return error.with_traceback(kept)
