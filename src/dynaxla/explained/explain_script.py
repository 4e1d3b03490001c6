"""Runs a user's script as Python does, and explains the functions that it compiles."""

from __future__ import annotations

import builtins
import sys
import time
import tokenize
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path

from .explain_function import Session
from .explanation import Explanation


def explain_script(script: Path, arguments: Sequence[str]) -> tuple[Explanation, int | str | None]:
    """Runs a Python script as `python script arguments...` does.

    Returns: the explanation of all functions that the script compiles with dynaxla, and its exit code, as in SystemExit.
    """
    session = Session()
    start = time.perf_counter()
    with session:
        code = run_script(script, arguments)
    error = f"it exits with {code}" if code not in (0, None) else ""
    return session.explanation(script.name, time.perf_counter() - start, error=error), code


def run_script(script: Path, arguments: Sequence[str]) -> int | str | None:
    """Runs a Python script as `python script arguments...` does, and returns its exit code, as in SystemExit.

    An uncaught exception is printed as Python prints it, and the code is 1 (130 for Ctrl-C).
    """
    path = script.absolute()
    module = types.ModuleType("__main__")
    loader = SourceFileLoader("__main__", str(path))
    module.__dict__.update(__file__=str(path), __builtins__=builtins, __cached__=None, __loader__=loader)
    saved = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = [str(script), *arguments]
    if not sys.flags.safe_path:
        sys.path[:1] = [str(path.resolve().parent)]
    sys.modules["__main__"] = module
    try:
        with tokenize.open(path) as file:  # in the encoding that the script declares
            source = file.read()
        exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except SystemExit as error:
        return error.code
    except BaseException as error:
        trace = error.__traceback__
        trace = trace.tb_next if trace is not None else None  # without this function's frame
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        return 130 if isinstance(error, KeyboardInterrupt) else 1
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = saved
    return 0
