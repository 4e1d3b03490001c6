"""Runs graphs op by op in torch if XLA cannot run them: in a forked child (see forks.py), and on fake tensors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from .. import forks
from ..observe import metrics
from . import private

log = logging.getLogger("dynaxla")

# Dispatch modes that trace torch's ops or compute only their shapes.
_TRACING_MODES = (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode)


def is_being_traced() -> bool:
    """True if an active dispatch mode traces ops (fake tensors, functionalization, make_fx), so that they compute no values."""
    return bool(private.mode_count()) and any(isinstance(mode, _TRACING_MODES) for mode in _get_current_dispatch_mode_stack())


def is_needed(args: Sequence[Any]) -> bool:
    """True if torch must run a graph with these inputs: one of them is a fake tensor, or this process cannot use XLA."""
    return forks.has_lost_xla() or any(isinstance(arg, FakeTensor) for arg in args)


def run(module: GraphModule, args: list[Any]) -> list[Any]:
    """Returns the outputs of a graph, computed op by op by torch. Empties args."""
    metrics.add("by_torch")
    if forks.has_lost_xla():
        _warn()
    with kernels():
        return list(_call(module, args))


def kernels() -> contextlib.AbstractContextManager[None]:
    """Returns a context in which torch's ops run as kernels, below autograd. In a forked child, torch uses one thread inside it."""
    return _kernels_in_fork() if forks.has_lost_xla() else private.below_autograd()


@contextlib.contextmanager
def _kernels_in_fork() -> Iterator[None]:
    with private.below_autograd(), _one_thread():
        yield


def _call(module: GraphModule, args: list[Any]) -> Sequence[Any]:
    inputs = args.copy()
    args.clear()
    return module(*inputs)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Sets torch to one thread inside the context. OpenMP's threads do not survive a fork, so torch would wait for them forever."""
    threads = torch.get_num_threads()
    if threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


_has_warned = False


def _warn() -> None:
    global _has_warned
    if not _has_warned:
        _has_warned = True
        log.warning("torch's own kernels run compiled graphs in this process: %s", forks.fork_error())
