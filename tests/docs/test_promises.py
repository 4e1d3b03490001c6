"""Each promise of docs/promises.md, in a process of its own where all that another library could see is watched."""

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
    """One whose heap is as the C library has it. Without a GPU: where torch sees one, its autograd begins threads, which a child lacks."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    environment |= {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "CUDA_VISIBLE_DEVICES": ""}
    environment |= variables
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False)


def test_promises() -> None:
    """And that others see nothing of a recording, and of the device no more than there is to it. The last one fails in any case, since
    there is none of that name: failures are told. XLA compiles quickly: its code is not the subject."""
    done = own_process("-m", "cases.promises", *SENTENCES, "recording", *DEVICE, "none_of_this_name", XLA_FLAGS=quick_compilation.flags())
    assert re.findall("^failed: (.*)$", done.stderr, re.MULTILINE) == ["none_of_this_name"], done.stderr
    assert done.returncode == 1


@pytest.mark.skipif(IS_OLDEST, reason="torch 2.11 cannot have the device")
def test_meshes_change_nothing_that_others_see() -> None:
    done = own_process("-m", "cases.promises", "meshes", XLA_FLAGS=f"--xla_force_host_platform_device_count=8 {quick_compilation.flags()}")
    assert done.returncode == 0, done.stderr


@contextlib.contextmanager
def put(holder: object, name: str, value: object) -> Iterator[None]:
    before = getattr(holder, name)
    setattr(holder, name, value)
    try:
        yield
    finally:
        setattr(holder, name, before)


@contextlib.contextmanager
def called(change: Callable[[], object], back: Callable[[], object]) -> Iterator[None]:
    change()
    try:
        yield
    finally:
        back()


def hook() -> contextlib.AbstractContextManager[object]:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    return called(lambda: None, handle.remove)


def move_limit(by: int) -> None:
    sys.setrecursionlimit(sys.getrecursionlimit() + by)


PLANTED: dict[str, Callable[[], contextlib.AbstractContextManager[object]]] = {
    "os.environ[PLANTED]": lambda: called(lambda: os.environ.update(PLANTED="1"), lambda: os.environ.pop("PLANTED")),
    "warnings.filters": lambda: warnings.catch_warnings(action="ignore"),
    "sys.excepthook": lambda: put(sys, "excepthook", print),
    "sys.path": lambda: put(sys, "path", ["/nowhere", *sys.path]),
    "threading.excepthook": lambda: put(threading, "excepthook", print),
    "switch interval": lambda: called(lambda: sys.setswitchinterval(0.001), lambda: sys.setswitchinterval(0.005)),
    "recursion limit": lambda: called(lambda: move_limit(1), lambda: move_limit(-1)),
    "gc": lambda: called(gc.disable, gc.enable),
    "gc.callbacks": lambda: called(lambda: gc.callbacks.append(print), lambda: gc.callbacks.remove(print)),
    "signals": lambda: called(lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN), lambda: signal.signal(signal.SIGUSR1, signal.SIG_DFL)),
    "logger planted": lambda: called(
        lambda: logging.getLogger("planted").setLevel("INFO"), lambda: logging.getLogger("planted").setLevel("NOTSET")
    ),
    "threads": lambda: called((started := threading.Timer(60, print)).start, lambda: (started.cancel(), started.join())),
    "torch.get_default_dtype": lambda: called(
        lambda: torch.set_default_dtype(torch.float64), lambda: torch.set_default_dtype(torch.float32)
    ),
    "torch.get_float32_matmul_precision": lambda: called(
        lambda: torch.set_float32_matmul_precision("high"), lambda: torch.set_float32_matmul_precision("highest")
    ),
    "torch.backends": lambda: called(
        lambda: torch.backends.cuda.enable_flash_sdp(False), lambda: torch.backends.cuda.enable_flash_sdp(True)
    ),
    "torch.stance": lambda: torch.compiler.set_stance("force_eager"),
    "torch._dynamo.config.recompile_limit": lambda: torch._dynamo.config.patch(recompile_limit=77),
    "torch.nn.modules.module._global_forward_hooks": hook,
    "grad mode": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu"),
    "modes": torch.overrides.BaseTorchFunctionMode,
    "saved tensors' hooks": lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x),
    "names of SGD": lambda: put(torch.optim.SGD, "step", lambda *_: None),
    "names of torch": lambda: put(torch, "matmul", torch.mm),
    "operators": lambda: library("operator"),
    "kernels for CPU": lambda: library("kernel"),
    "jax.config.jax_enable_x64": lambda: called(
        lambda: jax.config.update("jax_enable_x64", True), lambda: jax.config.update("jax_enable_x64", False)
    ),
    "jax in this thread": lambda: jax.enable_x64(True),
    "numpy errors": lambda: np.errstate(divide="ignore"),
    "numpy random": lambda: called(lambda: np.random.random(), lambda: None),
    "random": lambda: called(random.random, lambda: None),
    "torch random": lambda: called(lambda: torch.rand(1), lambda: None),
    "denormals": lambda: called(lambda: torch.set_flush_denormal(True), lambda: torch.set_flush_denormal(False)),
}


@contextlib.contextmanager
def library(kind: str) -> Iterator[None]:
    with torch.library._scoped_library("planted", "FRAGMENT") as planted:
        planted.define(f"of_{kind}(Tensor x) -> Tensor")
        if kind == "kernel":
            planted.impl("of_kernel", lambda x: x, "CPU")
        yield


@pytest.mark.sample(usual=6)
@pytest.mark.parametrize("name", PLANTED)
def test_the_watch_sees(name: str) -> None:
    before = visible.snapshot()
    with PLANTED[name]():
        assert name in visible.differences(before, visible.snapshot())
    assert not set(visible.differences(before, visible.snapshot())) - {"torch random", "numpy random", "random"}


def test_the_watch_sees_what_passes() -> None:
    """What another thread does and undoes; settings of a thread's own are not to be seen from another."""

    def change() -> None:
        with torch.compiler.set_stance("force_eager"), torch.no_grad():
            while len(watch.seen) == 0:
                pass

    with visible.Watch() as watch:
        change()
    assert set(watch.seen) == {"torch.stance"}


def test_the_heaps_probe() -> None:
    """In a process of its own, which mallopt then changes."""
    script = """
import ctypes
from cases.promises.visible import keeps_freed_memory
assert keeps_freed_memory() in (False, None)
ctypes.CDLL(None).mallopt(-3, 2**31 - 1)
assert keeps_freed_memory() in (True, None)
"""
    done = own_process("-c", script)
    assert done.returncode == 0, done.stderr


USES = [
    ["dynaxla.compile_step", "dynaxla.lowers", "dynaxla.observe"],
    ["torch.compile(lambda x: x + 1, backend='dynaxla')(torch.ones(2))"],
]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_the_first_use_draws_no_random_numbers() -> None:
    """Each first use is in a child of its own, which imports JAX; after `compile_step` come uses for which little is left to import."""
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
