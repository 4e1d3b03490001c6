"""What the device "jax" does, in functions whose names begin with `check_`. Registering it is for a process's life, so each module of them
runs in a process of its own: `scripts.run_script("from cases import device; device.run('NAME')")`."""

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
    """From now on, ops, what is recorded, and graphs: the subject here is what XLA is given, and what becomes of its results."""
    options_for, quickly = op_compiler.options_for, quick_compilation.options()
    for module in (op_compiler, engine_compile):
        module.options_for = lambda *problem: {**options_for(*problem), **quickly}
    skip_guard_profile()


def run(name: str) -> None:
    """Run all of a module's checks on a fresh device. Exits with 1 if one fails, and names it."""
    faulthandler.enable()
    dynaxla.device.enable()
    compile_quickly()
    module = importlib.import_module(f"cases.device.{name}")
    failed = 0
    for title, check in sorted(vars(module).items()):
        if title.startswith("check_"):
            print(f"{name}.{title}", file=sys.stderr, flush=True)  # the last one before a crash
            torch.manual_seed(0)
            try:
                with warnings.catch_warnings(action="error"):
                    check()
            except Exception:
                failed += 1
                traceback.print_exc()
    sys.exit(failed > 0)
