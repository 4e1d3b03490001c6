"""Graphs that torch runs op by op, where XLA has no part: behind a fork (see forks.py), and with tensors that hold no numbers."""

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

# Modes under which torch's ops are looked at instead of computed.
_LOOKING = (FakeTensorMode, FunctionalTensorMode, ProxyTorchDispatchMode)


def is_looked_at() -> bool:
    """Whether somebody wants to see the ops (fake tensors, make_fx), not the numbers."""
    return bool(private.mode_count()) and any(isinstance(mode, _LOOKING) for mode in _get_current_dispatch_mode_stack())


def is_needed(args: Sequence[Any]) -> bool:
    """Whether these inputs of a graph hold no numbers, or this process cannot use XLA."""
    return forks.is_cut_off() or any(isinstance(arg, FakeTensor) for arg in args)


def run(module: GraphModule, args: list[Any]) -> list[Any]:
    """What the graph gives for its inputs. Empties args."""
    metrics.add("by_torch")
    if forks.is_cut_off():
        _warn()
    with kernels():
        return list(_call(module, args))


def kernels() -> contextlib.AbstractContextManager[None]:
    """Inside, torch's ops run as kernels: below autograd, and behind a fork with one thread."""
    return _kernels_behind_a_fork() if forks.is_cut_off() else private.below_autograd()


@contextlib.contextmanager
def _kernels_behind_a_fork() -> Iterator[None]:
    with private.below_autograd(), _one_thread():
        yield


def _call(module: GraphModule, args: list[Any]) -> Sequence[Any]:
    given = args.copy()
    args.clear()
    return module(*given)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Inside, torch uses no threads of OpenMP's: those of the parent do not live on either, and torch would wait for them."""
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
        log.warning("torch's own kernels run compiled graphs in this process: %s", forks.cut_off())
