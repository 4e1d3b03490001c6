"""Tests of the promises of docs/promises.md, in processes that compare all process state that another library could see."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator

import jax
import numpy as np
import pytest
import torch

from cases.promises import visible
from support.paths import TESTS
from support.processes.scripts import run_script
from support.releases import IS_OLDEST
from support.timing import quick_compilation

SENTENCES = [
    "results_of_eager_mode",
    "no_stale_parameters",
    "failed_calls_change_nothing",
    "no_dead_ends",
    "clear_errors",
    "no_side_effects",
]
# torch 2.11 cannot have the device.
DEVICE = [] if IS_OLDEST else ["the_device"]


def own_process(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a process with the C library's default heap, and without a GPU: with one, torch's autograd starts threads, which forks lack."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    environment |= {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
    environment |= variables
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_promises() -> None:
    """Also checks that recordings and the device change no other visible state. The last name does not exist: it must be reported."""
    process = own_process(
        "-m", "cases.promises", *SENTENCES, "recording", *DEVICE, "none_of_this_name", XLA_FLAGS=quick_compilation.flags()
    )
    assert re.findall("^failed: (.*)$", process.stderr, re.MULTILINE) == ["none_of_this_name"], process.stderr
    assert process.returncode == 1


@pytest.mark.skipif(IS_OLDEST, reason="torch 2.11 cannot have the device")
def test_meshes_change_no_visible_state() -> None:
    process = own_process(
        "-m", "cases.promises", "meshes", XLA_FLAGS=f"--xla_force_host_platform_device_count=8 {quick_compilation.flags()}"
    )
    assert process.returncode == 0, process.stderr


@contextlib.contextmanager
def replaced(holder: object, name: str, value: object) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def changed(apply: Callable[[], object], undo: Callable[[], object]) -> Iterator[None]:
    apply()
    try:
        yield
    finally:
        undo()


def hook() -> contextlib.AbstractContextManager[object]:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    return changed(lambda: None, handle.remove)


def move_limit(by: int) -> None:
    sys.setrecursionlimit(sys.getrecursionlimit() + by)


PLANTED: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "os.environ[PLANTED]": lambda: changed(lambda: os.environ.update(PLANTED="1"), lambda: os.environ.pop("PLANTED")),
    "warnings.filters": lambda: warnings.catch_warnings(action="ignore"),
    "sys.excepthook": lambda: replaced(sys, "excepthook", print),
    "sys.path": lambda: replaced(sys, "path", ["/nowhere", *sys.path]),
    "threading.excepthook": lambda: replaced(threading, "excepthook", print),
    "switch interval": lambda: changed(lambda: sys.setswitchinterval(0.001), lambda: sys.setswitchinterval(0.005)),
    "recursion limit": lambda: changed(lambda: move_limit(1), lambda: move_limit(-1)),
    "gc": lambda: changed(gc.disable, gc.enable),
    "gc.callbacks": lambda: changed(lambda: gc.callbacks.append(print), lambda: gc.callbacks.remove(print)),
    "signals": lambda: changed(
        lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN), lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    ),
    "logger planted": lambda: changed(
        lambda: logging.getLogger("planted").setLevel("INFO"), lambda: logging.getLogger("planted").setLevel("NOTSET")
    ),
    "threads": lambda: changed((started := threading.Timer(60, print)).start, lambda: (started.cancel(), started.join())),
    "torch.get_default_dtype": lambda: changed(
        lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)
    ),
    "torch.get_float32_matmul_precision": lambda: changed(
        lambda: torch.set_float32_matmul_precision("high"), lambda: torch.set_float32_matmul_precision("highest")
    ),
    "torch.backends": lambda: changed(
        lambda: torch.backends.cuda.enable_flash_sdp(False), lambda: torch.backends.cuda.enable_flash_sdp(True)
    ),
    "torch.stance": lambda: torch.compiler.set_stance("force_eager"),
    "torch._dynamo.config.recompile_limit": lambda: torch._dynamo.config.patch(recompile_limit=77),
    "torch.nn.modules.module._global_forward_hooks": hook,
    "grad mode": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu"),
    "modes": torch.overrides.BaseTorchFunctionMode,
    "saved tensors' hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "names of SGD": lambda: replaced(torch.optim.SGD, "step", lambda *_: None),
    "names of torch": lambda: replaced(torch, "matmul", torch.mm),
    "operators": lambda: library("operator"),
    "kernels for CPU": lambda: library("kernel"),
    "jax.config.jax_enable_x64": lambda: changed(
        lambda: jax.config.update("jax_enable_x64", True), lambda: jax.config.update("jax_enable_x64", False)
    ),
    "jax in this thread": lambda: jax.enable_x64(True),
    "numpy errors": lambda: np.errstate(divide="ignore"),
    "numpy random": lambda: changed(lambda: np.random.random(), lambda: None),
    "random": lambda: changed(random.random, lambda: None),
    "torch random": lambda: changed(lambda: torch.rand(1), lambda: None),
    "denormals": lambda: changed(lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
}


@contextlib.contextmanager
def library(kind: str) -> Iterator[None]:
    with torch.library._scoped_library("planted", "FRAGMENT") as planted_library:
        planted_library.define(f"of_{kind}(Tensor x) -> Tensor")
        if kind == "kernel":
            planted_library.impl("of_kernel", lambda x: x, "CPU")
        yield


@pytest.mark.sample(usual=6)
@pytest.mark.parametrize("name", PLANTED)
def test_snapshot_shows_a_change_of_state(name: str) -> None:
    before = visible.snapshot()
    with PLANTED[name]():
        assert name in visible.differences(before, visible.snapshot())
    assert not set(visible.differences(before, visible.snapshot())) - {"torch random", "numpy random", "random"}


def test_watch_shows_a_temporary_change() -> None:
    """Another thread sees the change of the stance, but not that of gradient mode, which belongs to the thread."""

    def change() -> None:
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            while len(watch.seen) == 0:
                pass

    with visible.Watch() as watch:
        change()
    assert set(watch.seen) == {"torch.stance"}


def test_keeps_freed_memory() -> None:
    """In its own process, because mallopt changes the heap."""
    script = """
import ctypes
from cases.promises.visible import keeps_freed_memory
assert keeps_freed_memory() in (False, None)
ctypes.CDLL(None).mallopt(-3, 2**31 - 1)
assert keeps_freed_memory() in (True, None)
"""
    process = own_process("-c", script)
    assert process.returncode == 0, process.stderr


USES = [
    ["dynaxla.compile_step", "dynaxla.lowers", "dynaxla.observe"],
    ["torch.compile(lambda x: x + 1, backend='dynaxla')(torch.ones(2))"],
]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_first_use_draws_no_random_numbers() -> None:
    """Each list of uses has its own child process, which imports JAX. The uses after `compile_step` have little left to import."""
    script = f"""if True:
        import os, random, sys, numpy, torch, dynaxla

        def states():
            return repr(numpy.random.get_state()), random.getstate(), torch.get_rng_state().tolist()

        assert "jax" not in sys.modules
        for uses in {USES!r}:
            child = os.fork()
            if not child:
                before = states()
                for use in uses:
                    exec(use)
                    assert states() == before, use
                sys.exit()
            assert os.waitpid(child, 0)[1] == 0, uses
    """
    run_script(script, own=True, XLA_FLAGS=quick_compilation.flags())
