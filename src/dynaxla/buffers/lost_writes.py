"""Finds writes to views that AOTAutograd would lose or get wrong, and raises an exception during the trace.

AOTAutograd replaces a write to a view by a new value of the view's base, and derives each view from the new base. For some views to which
eager mode can write, this replacement gives wrong results (with torch's own backends, too):

- `unfold` with gaps between the windows: the elements in the gaps would become zero.
- Views that repeat elements (`expand`, and `as_strided` or `unfold` with overlapping windows): several values written to one element would
  be added up, or one of the writes would be lost.
- `as_strided` of a base with gaps, or with another memory order than the base's new value: `as_strided` addresses memory directly, and
  would find other elements in the new value.

AOTAutograd traces the forward and the backward pass as one graph, in which each tensor has one final value. If both passes write to an
input, the input would have its value from the backward pass already after the forward pass, or would be written twice. If the backward pass
writes to a tensor that the forward pass created, a second backward pass would not see the write.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, disable_functional_mode
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols, guard_or_false, statically_known_true
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..capture.eager_strides import with_eager_strides
from ..runtime import private
from ..torch_ops import aten
from .overlaps import has_internal_overlap

# Returns the reason why a write to a view would be lost, as a clause about the view; None if the write would not be lost.
Reason = Callable[[], str | None]

_WRITE_IN_ONE_PASS = "write to it in only one of the passes, or keep the function out of the graph with torch.compiler.disable"


class LostWrite(Exception):
    """Raised for a write that the graph would lose or get wrong.

    Attributes:
        reason: The reason, as a clause about the user's program that begins with "it". (The exception's own text may be longer, because
            torch appends to it.)
        hint: The change to the program that avoids the error.
    """

    def __init__(self, reason: str, hint: str = "write to a clone of the view, and copy the clone back") -> None:
        super().__init__(reason)
        self.reason, self.hint = reason, hint


class LostWrites(TorchDispatchMode):
    """A dispatch mode that inspects ops before they are functionalized, and raises LostWrite for a write that would be lost."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        # By the tensor's id: the views to which a write may be lost, with the reasons, and the tensors on which `as_strided` was called.
        # The dicts keep the tensors alive, so that no id is reused.
        self._views: dict[int, tuple[torch.Tensor, tuple[Reason, ...]]] = {}
        self._as_strided_sources: dict[int, FunctionalTensor] = {}
        # The storages that the forward pass has created or written to.
        self._forward_memory: set[StorageWeakRef] = set()
        # The id of the backward pass that is running when the trace begins (-1 if none is). During the trace, another id means that the
        # backward pass of the traced function is running.
        self._enclosing_backward = private.backward_id()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Returns True, so that torch turns this mode off while torch.compile compiles a function (see TorchDispatchMode)."""
        return True

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (FunctionalTensor, FakeTensor) for kind in types):
            return NotImplemented  # the subclass handles the op; the ops that it calls in turn reach this mode, too
        if not isinstance(func, OpOverload):
            result = func(*args, **kwargs)
            self._record_forward_memory(result)
            return result
        device = next((leaf.device.type for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), "cpu")
        if _is_composite(func, device):  # in inference mode, torch dispatches composite ops to modes without decomposing them first
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        written = pytree.tree_leaves([kwargs.get(name, args[position : position + 1]) for position, name in _written_arguments(func)])
        for tensor in written:
            self.check(func, tensor)
        result = with_eager_strides(func, args, kwargs, func(*args, **kwargs))
        if _is_view(func) and isinstance(args[0], FunctionalTensor):
            self._record_view(func, args, result)
        else:
            self._record_forward_memory((result, written))
        if written:
            for tensor in self._as_strided_sources.values():
                _check_eager_strides(tensor)
        return result

    def check(self, func: OpOverload, tensor: Any) -> None:
        """Checks a tensor that is about to be written to.

        Raises:
            LostWrite: A write through this view would be lost, or the backward pass writes to memory of the forward pass.
        """
        if (
            self._forward_memory
            and isinstance(tensor, FunctionalTensor)
            and self._is_backward()
            and _memory(tensor) in self._forward_memory
        ):
            raise LostWrite(f"its backward pass writes with {func} to memory that its forward pass created or wrote to", _WRITE_IN_ONE_PASS)
        if id(tensor) not in self._views:
            return
        with disable_proxy_modes_tracing():
            texts = [text for reason in self._views[id(tensor)][1] if (text := reason())]
        if texts:
            raise LostWrite(f"it writes with {func} to a view that {texts[0]}")

    def _is_backward(self) -> bool:
        return private.backward_id() != self._enclosing_backward

    def _record_forward_memory(self, tensors: Any) -> None:
        """Records that these tensors were created or written to, if the forward pass is being traced."""
        if not self._is_backward():
            self._forward_memory.update(_memory(leaf) for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, FunctionalTensor))

    def _record_view(self, func: OpOverload, args: Sequence[Any], result: Any) -> None:
        """Records why writes to a new view would be lost: the reasons of its source, and the reason of the view op, if it has one."""
        source = args[0]
        reasons = self._views[id(source)][1] if id(source) in self._views else ()
        if func is aten.as_strided.default:
            self._as_strided_sources[id(source)] = source
            _check_eager_strides(source)
        if func in _REASONS:
            reasons = (*reasons, functools.partial(_REASONS[func], source, result, *args[1:]))
        if reasons:
            for view in pytree.tree_leaves(result):
                self._views[id(view)] = view, reasons


@contextlib.contextmanager
def without_lost_write_checks() -> Iterator[None]:
    """Suspends `LostWrites` inside the context, for ops that a compiler adds to those of the user's program."""
    if isinstance(private.innermost_mode(), LostWrites):
        with private.without_innermost_mode():
            yield
    else:
        yield


@functools.cache
def _is_composite(func: OpOverload, device: str) -> bool:
    """True if an op has no kernel on this device type and decomposes into other ops. False for queries of a tensor's metadata."""
    return func not in FunctionalTensor.metadata_fns and private.is_composite(func, device)


@functools.cache
def _written_arguments(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Returns the positions and names of the arguments that an op writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple((position, item.name) for position, item in arguments if item.alias_info is not None and item.alias_info.is_write)


@functools.cache
def _is_view(func: OpOverload) -> bool:
    """True if a result of an op aliases an argument that the op does not write to."""
    return any(item.alias_info is not None and not item.alias_info.is_write for item in func._schema.returns)


def _memory(tensor: FunctionalTensor) -> StorageWeakRef:
    """Returns a reference to a tensor's storage. A tensor and its views have the same storage."""
    return StorageWeakRef(tensor.elem.untyped_storage())


def _check_eager_strides(tensor: FunctionalTensor) -> None:
    """Checks that the traced value of a tensor on which `as_strided` was called has eager mode's strides and storage offset.

    Raises:
        LostWrite: The value has other strides or another storage offset.
    """
    with disable_functional_mode():
        value = private.functional_value(tensor)
    with disable_proxy_modes_tracing():  # the comparisons of sizes must not become part of the program
        steps = [(size, *pair) for size, *pair in zip(tensor.shape, value.stride(), tensor.stride(), strict=True)]
        is_same = all(statically_known_true(size == 1) or statically_known_true(traced == eager) for size, traced, eager in steps)
        is_same = is_same and statically_known_true(value.storage_offset() == tensor.storage_offset())
    if not is_same:
        raise LostWrite(
            "it calls aten.as_strided on a tensor that it writes to, and in the graph that tensor has other strides, or another storage "
            "offset, than in eager mode"
        )


def _reason_of_unfold(source: torch.Tensor, view: torch.Tensor, dim: int, size: int, step: int) -> str | None:
    """Returns None if the windows cover the dimension in order, without gaps or overlaps; else a reason.

    A single window that is longer than the step is also a reason, because torch refuses a write to it.
    """
    length, count = (source.shape[dim], view.shape[dim]) if source.dim() else (1, 1)
    if guard_or_false(size * count == length) and guard_or_false(size <= step):
        return None
    return f"aten.unfold made with windows of size {size} at every {step} positions"


def _reason_of_expand(source: torch.Tensor, view: torch.Tensor, *_: Any) -> str | None:
    """Returns a reason if the op expanded a dimension, else None."""
    before = (*[1] * (view.dim() - source.dim()), *source.shape)
    if all(guard_or_false(old == new) for old, new in zip(before, view.shape, strict=True)):
        return None
    return f"aten.expand made with shape {tuple(view.shape)} from shape {tuple(source.shape)}"


def _reason_of_as_strided(source: torch.Tensor, view: torch.Tensor, *_: Any) -> str | None:
    """Returns a reason if elements of the view share memory, or if its sizes or strides depend on data; else None."""
    if not free_unbacked_symbols((*view.shape, *view.stride())) and not has_internal_overlap(view):
        return None
    return f"aten.as_strided made with overlapping elements: shape {tuple(view.shape)}, strides {view.stride()}"


_REASONS: dict[OpOverload, Callable[..., str | None]] = {
    aten.as_strided.default: _reason_of_as_strided,
    aten.expand.default: _reason_of_expand,
    aten.unfold.default: _reason_of_unfold,
}
