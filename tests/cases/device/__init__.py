"""Checks of the device "jax": the functions in this folder whose names begin with `check_`.

Registering the device lasts until a process ends. So the checks of each module run in a process of their own:
`scripts.run_script("from cases import device; device.run('NAME')")`.
"""

from __future__ import annotations

import faulthandler
import importlib
import sys
import traceback
import warnings

import torch

import dynaxla
from dynaxla.device import op_compiler
from dynaxla.engine import compile as engine_compile
from support.timing import quick_compilation
from support.timing.dynamo_speed import skip_guard_profile


def compile_quickly() -> None:
    """From now on, XLA compiles ops, recordings and graphs with few optimizations. The checks are not about speed."""
    options_for, quick_options = op_compiler.options_for, quick_compilation.options()
    for module in (op_compiler, engine_compile):
        module.options_for = lambda *args: {**options_for(*args), **quick_options}
    skip_guard_profile()


def run(name: str) -> None:
    """Enables the device and runs all checks of a module. Exits with 1 after the traceback of each failed check."""
    faulthandler.enable()
    dynaxla.device.enable()
    compile_quickly()
    module = importlib.import_module(f"cases.device.{name}")
    failed = 0
    for title, check in sorted(vars(module).items()):
        if title.startswith("check_"):
            print(f"{name}.{title}", file=sys.stderr, flush=True)  # names the check that ends the process
            torch.manual_seed(0)
            try:
                with warnings.catch_warnings(action="error"):
                    check()
            except Exception:
                failed += 1
                traceback.print_exc()
    sys.exit(failed > 0)
