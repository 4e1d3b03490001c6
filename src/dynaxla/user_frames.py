"""Finds frames and lines of user code."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import TypeVar

# Prefixes of the file names of generated code: torch.fx's code, and the interpreter's frozen modules.
_GENERATED = ("<eval_with_key>", "<frozen ")
# The folder of Python's standard library, and the names of folders in it that contain installed packages.
_LIBRARY, _INSTALLED = os.path.dirname(os.__file__) + os.sep, ("site-packages", "dist-packages")

Error = TypeVar("Error", bound=BaseException)


@functools.cache
def _excluded_prefixes() -> tuple[str, ...]:
    """Returns the prefixes of file names of dynaxla, torch and JAX, and of generated code. Neither torch nor JAX is imported."""
    specs = [importlib.util.find_spec(name) for name in ("torch", "jax", "jaxlib")]
    files = [__file__, *(spec.origin for spec in specs if spec is not None and spec.origin is not None)]
    return *(os.path.dirname(file) + os.sep for file in files), *_GENERATED


def innermost() -> tuple[str, int, str] | None:
    """Returns the file, line and function of the innermost user frame (see `is_user_file`); None if there is none."""
    frame = _innermost_frame()
    return None if frame is None else (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)


def _innermost_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_user_file(file: str) -> bool:
    """True if a file belongs neither to torch, JAX, dynaxla or Python's standard library, nor to generated code (`_GENERATED`)."""
    is_library = file.startswith(_LIBRARY) and not file.startswith(_INSTALLED, len(_LIBRARY))
    return not is_library and not file.startswith(_excluded_prefixes())


def location() -> str:
    """Returns the innermost user frame as text, such as `/home/me/model.py:41, in forward`; "" if there is none."""
    found = innermost()
    return "" if found is None else f"{found[0]}:{found[1]}, in {found[2]}"


def short_location() -> str:
    """Returns `location` without the folder, such as `model.py:41, in forward`; "" if there is no user frame."""
    return os.path.basename(location())


def location_of(error: BaseException, inner: Sequence[traceback.FrameSummary] = ()) -> str:
    """Returns the innermost user frame of an exception's traceback, in the form of `location`; "" if there is none.

    A frame in `<string>` is returned only if there is no other user frame.

    Args:
        error: the exception.
        inner: further frames, called by the last frame of the traceback, outermost first. TorchDynamo traces such frames without running
            them, so the traceback does not have them.
    """
    frames = [*traceback.extract_tb(error.__traceback__), *inner]
    found = [frame for frame in reversed(frames) if is_user_file(frame.filename)]
    # <string> is the program of `python -c`, or code that torch generates.
    frame = next((frame for frame in found if frame.filename != "<string>"), found[0] if found else None)
    return "" if frame is None else f"{frame.filename}:{frame.lineno}, in {frame.name}"


def warn_deprecated(text: str) -> None:
    """Issues a DeprecationWarning at the line of the innermost user frame."""
    frame = _innermost_frame()
    if frame is None:
        warnings.warn(text, DeprecationWarning, stacklevel=2)
        return
    module_globals = frame.f_globals
    registry = module_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, DeprecationWarning, frame.f_code.co_filename, frame.f_lineno, module_globals.get("__name__"), registry)


def is_verbose() -> bool:
    """True if the user wants full tracebacks, by torch's own setting `torch._dynamo.config.verbose` (variable TORCHDYNAMO_VERBOSE)."""
    from torch._dynamo import config

    return bool(config.verbose)


def with_user_frames_only(error: Error) -> Error:
    """Shortens the exception's traceback to the user's frames and the innermost frame, unless `is_verbose()`. Returns the exception."""
    from torch.compiler import disable

    # If a call raises an error, TorchDynamo still traces the functions that handle the error. It rejects generators, such as the one in
    # `_excluded_prefixes`, so `_with_user_frames_only` runs without TorchDynamo.
    return error if is_verbose() else disable(_with_user_frames_only)(error)


def _with_user_frames_only(error: Error) -> Error:
    tracebacks: list[TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        tracebacks.append(entry)
        entry = entry.tb_next
    result: TracebackType | None = None
    for entry in reversed(tracebacks):
        if result is None or is_user_file(entry.tb_frame.f_code.co_filename):
            result = TracebackType(result, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return error.with_traceback(result)
