"""The state that another library in the process, or another thread, can see: settings of torch, JAX, NumPy, Python and the C library.

`snapshot` reads this state once. `Watch` reads it repeatedly in a second thread, while the first thread works.

Dictionaries are copied before iteration, because the other thread may change them.
"""

from __future__ import annotations

import atexit
import copyreg
import ctypes
import decimal
import faulthandler
import gc
import hashlib
import inspect
import locale
import logging
import multiprocessing
import os
import platform
import random
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import torch
from jax._src import xla_bridge
from torch.utils._config_module import ConfigModule

State = dict[str, Any]

# The namespace of dynaxla's own operators.
OWN = "dynaxla"


def snapshot(registrations: bool = True) -> State:
    """Returns the state that the calling thread can see, by name. Values can be compared with ==.

    Args:
        registrations: include registrations of operators, which take most of the time.
    """
    state: State = {}
    for part in (python, interpreter, log, torch_settings, torch_thread, torch_hooks, torch_names, jax_settings, numbers):
        state.update(part())
    if registrations:
        state.update(torch_registrations())
    return state


def differences(before: State, after: State) -> dict[str, tuple[Any, Any]]:
    missing = "(nothing)"
    names = before.keys() | after.keys()
    return {
        name: (before.get(name, missing), after.get(name, missing))
        for name in sorted(names)
        if before.get(name, missing) != after.get(name, missing)
    }


def python() -> State:
    """Settings of the process."""
    return {
        **{f"os.environ[{name}]": value for name, value in os.environ.copy().items()},
        "cwd": os.getcwd(),
        "umask": _umask(),
        "affinity": sorted(os.sched_getaffinity(0)),
        "rlimits": [resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")],
        "locale": locale.setlocale(locale.LC_ALL),
        "signals": {int(number): repr(signal.getsignal(number)) for number in signal.valid_signals()},
        "signal wakeup": faulthandler.is_enabled(),
        "atexit": atexit._ncallbacks(),
        "multiprocessing": multiprocessing.get_start_method(allow_none=True),
        "socket timeout": socket.getdefaulttimeout(),
        "tempdir": tempfile.tempdir,
        "threads": sorted(thread.name for thread in threading.enumerate() if _keeps_alive(thread)),
    }


def _keeps_alive(thread: threading.Thread) -> bool:
    """True if the process stays alive until this thread ends.

    Excludes the timer that JAX starts when it looks for a TPU, on the first query of JAX's devices.
    """
    is_jaxs_timer = isinstance(thread, threading.Timer) and thread.function.__module__ == "jax._src.xla_bridge"
    return isinstance(thread, threading.Thread) and not thread.daemon and not is_jaxs_timer


def _umask() -> str:
    with open("/proc/self/status") as file:
        return next(line for line in file if line.startswith("Umask"))


def interpreter() -> State:
    names = ("excepthook", "unraisablehook", "displayhook", "breakpointhook", "stdin", "stdout", "stderr", "dont_write_bytecode", "argv")
    return {
        **{f"sys.{name}": _identity(getattr(sys, name)) for name in names},
        "sys.path": list(sys.path),
        "sys.meta_path": list(map(_identity, sys.meta_path)),
        "sys.path_hooks": list(map(_identity, sys.path_hooks)),
        "trace": (_identity(sys.gettrace()), _identity(sys.getprofile())),
        "threads' trace": (_identity(threading.gettrace()), _identity(threading.getprofile())),
        "threading.excepthook": _identity(threading.excepthook),
        "threading.stack_size": threading.stack_size(),
        "switch interval": sys.getswitchinterval(),
        "recursion limit": sys.getrecursionlimit(),
        "int digits": sys.get_int_max_str_digits(),
        "dlopen flags": sys.getdlopenflags(),
        # TorchDynamo raises the oldest generation's threshold while it traces (torch 2.15).
        "gc": (gc.isenabled(), gc.get_threshold()[:2], gc.get_debug(), gc.get_freeze_count() > 0),
        "gc.callbacks": list(map(_identity, gc.callbacks)),
        "warnings.filters": list(warnings.filters),
        "warnings": (_identity(_showwarning()), _identity(warnings.warn), warnings.defaultaction),
        "copyreg": len(copyreg.dispatch_table),
        "decimal": repr(decimal.getcontext()),
        "modules": [name for name in ("matplotlib", "torchvision", "timm", "transformers", "typer", "rich") if name in sys.modules],
        "builtins": _names(__builtins__ if isinstance(__builtins__, dict) else vars(__builtins__)),
    }


def _showwarning() -> Any:
    """Returns `warnings.showwarning` without the wrapper that TorchDynamo installs while it makes fake tensors of arguments."""
    function: Any = warnings.showwarning
    while function.__module__ == "torch._logging._internal":
        function = inspect.getclosurevars(function).nonlocals["prior"]
    return function


def log() -> State:
    """Loggers with settings, handlers or filters. A logger that was only created is not a visible change."""
    state: State = {"logging": (logging.root.manager.disable, logging.raiseExceptions, _identity(logging.getLoggerClass()))}
    loggers = {"root": logging.root, **logging.root.manager.loggerDict.copy()}
    for name, logger in loggers.items():
        if isinstance(logger, logging.Logger):
            settings = (
                logger.level,
                [_identity(handler) for handler in logger.handlers],
                logger.propagate,
                logger.disabled,
                len(logger.filters),
            )
            if settings != (logging.NOTSET, [], True, False, 0):
                state[f"logger {name}"] = settings
    return state


def torch_settings() -> State:
    backends = torch.backends
    state: State = {
        "torch.get_default_dtype": torch.get_default_dtype(),
        "torch.get_default_device": torch.get_default_device(),
        "torch.get_num_threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch.deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        ),
        "torch.get_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "torch.backends": (
            backends.cuda.matmul.allow_tf32,
            backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
            backends.cudnn.enabled,
            backends.cudnn.benchmark,
            backends.cudnn.deterministic,
            backends.cudnn.allow_tf32,
            backends.mkldnn.enabled,
            backends.opt_einsum.enabled,
            backends.cuda.flash_sdp_enabled(),
            backends.cuda.mem_efficient_sdp_enabled(),
            backends.cuda.math_sdp_enabled(),
            backends.cuda.cudnn_sdp_enabled(),
        ),
        "torch.anomaly": (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        "torch.printoptions": repr(vars(torch._tensor_str.PRINT_OPTS)),
        "torch.stance": repr(torch._dynamo.eval_frame._stance),
        "torch.compiler": (torch.compiler.is_compiling(), torch.compiler.is_dynamo_compiling(), torch.compiler.is_exporting()),
        "torch.fx tracing": torch.fx._symbolic_trace.is_fx_symbolic_tracing(),
        "torch.cuda": torch.cuda.is_initialized(),
        "torch accelerator": repr(torch.accelerator.current_accelerator()),
        "torch.overwrite": (
            torch.__future__.get_overwrite_module_params_on_conversion(),
            torch.__future__.get_swap_module_params_on_conversion(),
        ),
    }
    for name, module in sys.modules.copy().items():
        if isinstance(module, ConfigModule):
            state |= {f"{name}.{key}": repr(value) for key, value in module.get_config_copy().items()}
    return state


def torch_thread() -> State:
    """torch's thread-local state."""
    kinds = ("cpu", "cuda")
    return {
        "grad mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_fwd_grad_enabled()),
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        + [torch.is_autocast_cache_enabled()],
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "torch function": torch._C._is_torch_function_enabled(),
        "functorch": torch._C._functorch.peek_interpreter_stack() is None,
        "dispatch keys": (str(torch._C._dispatch_tls_local_include_set()), str(torch._C._dispatch_tls_local_exclude_set())),
        "autograd": (torch._C._is_multithreading_enabled(), torch._C._is_view_replay_enabled()),
        "saved tensors' hooks": _identity(torch._C._autograd._top_saved_tensors_default_hooks(True)),
        "eval frame": _identity(torch._C._dynamo.eval_frame.get_eval_frame_callback()),
        "tracing": torch._guards.TracingContext.try_get() is None and torch._guards.CompileContext.try_get() is None,
    }


def torch_hooks() -> State:
    """Hooks on all modules, optimizers and checkpoints."""
    state: State = {}
    for module in (torch.nn.modules.module, sys.modules["torch.optim.optimizer"]):  # torch.optim does not name the latter
        for name, value in vars(module).copy().items():
            if name.startswith("_global_") and isinstance(value, Mapping):
                state[f"{module.__name__}.{name}"] = len(value)
    return state


_PATCHABLE = (
    torch, torch.Tensor, torch.nn.Module, torch.nn.Parameter, torch.nn.functional, torch.autograd, torch.autograd.Function, torch.compiler,
    torch.optim, torch.optim.Optimizer, torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.utils.checkpoint, torch.random,
    jax, jax.numpy, jax.lax, jax.Array, np, random, warnings, threading, time, os,
)  # fmt: skip


def torch_names() -> State:
    """Hashes of namespaces of torch, JAX, NumPy and Python, to detect replaced functions."""
    return {f"names of {getattr(holder, '__name__', holder)}": _names(vars(holder)) for holder in _PATCHABLE}


def _names(namespace: Any) -> int:
    """Returns a hash of the public names and their values, without submodules, which appear when they are imported."""
    ids = {name: id(value) for name, value in namespace.copy().items() if not isinstance(value, types.ModuleType) and name[:1] != "_"}
    return hash(frozenset(ids.items()))


def torch_registrations() -> State:
    """Operators and their kernels, decompositions, and registrations with torch.compile, without dynaxla's own operators."""
    from torch._dynamo import trace_rules

    state: State = {"operators": _digest(name for name in torch._C._dispatch_get_all_op_names() if not name.startswith(f"{OWN}::"))}
    for key in ("CPU", "CUDA", "Meta", "AutogradCPU", "CompositeImplicitAutograd", "Functionalize", "Python", "ADInplaceOrView"):
        registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
        state[f"kernels for {key}"] = _digest(name for name in registered if not name.startswith(f"{OWN}::"))
    state |= {f"decompositions, {kind}": len(table) for kind, table in torch._decomp.global_decomposition_table.items()}
    state["pytree"] = len(torch.utils._pytree.SUPPORTED_NODES)
    state["trace rules"] = [
        len(ids()) if not isinstance(ids, type) and callable(ids) else repr(ids)
        for ids in (
            trace_rules._allowed_callable_ids.function_ids if hasattr(trace_rules._allowed_callable_ids, "function_ids") else None,
            trace_rules._disallowed_callable_ids.function_ids if hasattr(trace_rules._disallowed_callable_ids, "function_ids") else None,
        )
        if ids is not None
    ]
    return state


def jax_settings() -> State:
    return {
        **{f"jax.config.{name}": repr(value) for name, value in jax.config.values.copy().items()},
        "jax in this thread": (
            jax.config.jax_enable_x64,
            repr(jax.config.jax_default_device),
            repr(jax.config.jax_default_matmul_precision),
        ),
        "jax's clients": sorted(xla_bridge._backends),
        "jax's platforms": sorted(xla_bridge._backend_factories),
        "jax's handler of forks": xla_bridge._at_fork_handler_installed,
        "jax's float64": str(jax.dtypes.canonicalize_dtype(np.float64)),
    }


def numbers() -> State:
    """State of random number generators, and settings of floating point arithmetic in this thread."""
    return {
        "numpy errors": repr(np.geterr()),
        "numpy print": repr(np.get_printoptions()),
        "numpy random": _digest(map(repr, np.random.get_state())),
        "random": _digest([repr(random.getstate())]),
        "torch random": _digest([torch.get_rng_state().numpy().tobytes().hex()]),
        "denormals": float(np.float32(1e-40) * np.float32(0.5)) != 0.0 and bool((torch.full((1,), 1e-40) * 0.5 != 0).item()),
        "rounding": ctypes.CDLL(None).fegetround(),
    }


def keeps_freed_memory() -> bool | None:
    """True if glibc is set to keep large freed blocks in its heap. None with other C libraries.

    By default, glibc allocates 40 MB with mmap, and sets a bit in front of the block.
    Source: mallopt(3), M_MMAP_THRESHOLD; glibc malloc/malloc.c, IS_MMAPPED.
    """
    if platform.libc_ver()[0] != "glibc":
        return None
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    block = libc.malloc(40 << 20)
    is_mapped = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value & 2
    libc.free(block)
    return not is_mapped


def _identity(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else (type(value).__name__, id(value))


def _digest(texts: Any) -> str:
    return hashlib.blake2b("\n".join(sorted(texts)).encode(), digest_size=16).hexdigest()


class Watch:
    """Takes snapshots in a second thread, from entry to exit.

    Attributes:
        seen: the first difference of each changed value from its value at the start, by name.
        reads: the number of snapshots.
        failure: the exception that has ended the thread.
    """

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Any, Any]] = {}
        self.reads = 0
        self.failure: BaseException | None = None
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._compare, name="watch", daemon=True)

    def _compare(self) -> None:
        try:
            before, complete = snapshot(False), snapshot()
            self._ready.set()
            while not self._stop.is_set():
                is_complete = self.reads % 50 == 0
                for name, values in differences(complete if is_complete else before, snapshot(is_complete)).items():
                    self.seen.setdefault(name, values)
                self.reads += 1
                self._stop.wait(0.01)  # leaves the interpreter lock to the other thread: a snapshot takes 6 ms
        except BaseException as error:
            self.failure = error
            self._ready.set()

    def __enter__(self) -> Watch:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure


def during(work: Callable[[], object]) -> dict[str, tuple[Any, Any]]:
    """Does the work, and returns the differences that a second thread has seen meanwhile."""
    with Watch() as watch:
        work()
    assert watch.reads > 0
    return watch.seen


def lines(changes: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    for name, (before, after) in changes.items():
        yield f"{name}: {str(before)[:300]} -> {str(after)[:300]}"
