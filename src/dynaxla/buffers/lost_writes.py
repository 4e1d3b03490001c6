"""Finds programs whose writes to views AOTAutograd would lose or get wrong, and raises before their graph is traced.

AOTAutograd replaces a write to a view by a new value of the view's base, and takes each view of the base again. Eager mode writes through
some views that do not survive this, in graphs compiled by torch itself either:

- `unfold` with gaps between its windows: the elements in the gaps would become zero.
- Views that repeat elements (`expand`, and `as_strided` or `unfold` with overlapping windows): several values written to one element would
  be added up, or one of the writes would be lost.
- `as_strided` addresses memory directly. The new value of a tensor may have another memory order there, or lack the tensor's gaps.

AOTAutograd traces both passes as one graph, in which a tensor has one last value: an input that both passes write to would have the
backward pass's value after the forward pass already, or would be written twice. A write of the backward pass to a tensor that the forward
pass created would be lost to a second backward pass.
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

from ..capture.eager_strides import as_in_eager_mode
from ..runtime import private
from ..torch_ops import aten
from .overlaps import shares_with_itself

# Returns why a write to a view would be lost; None if it would not be.
Reason = Callable[[], str | None]

_WRITE_LATER = "write to it in only one of the passes, or keep the function out of the graph with torch.compiler.disable"


class LostWrite(Exception):
    """The graph would lose a write, or return a wrong value for it.

    Attributes:
        what: What the program does, as "it ..."; kept because torch appends to the exception's own text.
        hint: The fix.
    """

    def __init__(self, what: str, hint: str = "write to a clone of the view, and copy the clone back") -> None:
        super().__init__(what)
        self.what, self.hint = what, hint


class LostWrites(TorchDispatchMode):
    """A dispatch mode that inspects ops before they are functionalized.

    Raises:
        LostWrite: Out of the trace.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        # By id: views to which a write may be lost, and tensors on which `as_strided` was called. The tensors are kept alive, so that no id
        # is reused.
        self._views: dict[int, tuple[torch.Tensor, tuple[Reason, ...]]] = {}
        self._strided: dict[int, FunctionalTensor] = {}
        # The memory that the forward pass has created or written to; and the backward pass, if any, during which the trace takes place.
        self._forward: set[StorageWeakRef] = set()
        self._around = private.graph_task()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Makes TorchDynamo compile under this mode as without it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (FunctionalTensor, FakeTensor) for kind in types):
            return NotImplemented  # the ops that a tensor subclass calls in turn are dispatched to this mode, too
        if not isinstance(func, OpOverload):
            result = func(*args, **kwargs)
            self._note_forward(result)
            return result
        device = next((leaf.device.type for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)), "cpu")
        if _is_composite(func, device):  # in inference mode, composite ops arrive here undecomposed
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        written = pytree.tree_leaves([kwargs.get(name, args[place : place + 1]) for place, name in _written(func)])
        for tensor in written:
            self.check(func, tensor)
        result = as_in_eager_mode(func, args, kwargs, func(*args, **kwargs))
        if _is_view(func) and isinstance(args[0], FunctionalTensor):
            self._follow(func, args, result)
        else:
            self._note_forward((result, written))
        if written:
            for tensor in self._strided.values():
                _check_place(tensor)
        return result

    def check(self, func: OpOverload, tensor: Any) -> None:
        """Checks a tensor that is about to be written to.

        Raises:
            LostWrite: The tensor is a view that a write does not survive, or belongs to the forward pass and is written in the backward
                pass.
        """
        if self._forward and isinstance(tensor, FunctionalTensor) and self._is_backward() and _memory(tensor) in self._forward:
            raise LostWrite(f"its backward pass writes with {func} to memory that its forward pass created or wrote to", _WRITE_LATER)
        if id(tensor) not in self._views:
            return
        with disable_proxy_modes_tracing():
            texts = [text for reason in self._views[id(tensor)][1] if (text := reason())]
        if texts:
            raise LostWrite(f"it writes with {func} to a view that {texts[0]}")

    def _is_backward(self) -> bool:
        return private.graph_task() != self._around

    def _note_forward(self, tensors: Any) -> None:
        """Records the memory that an op of the forward pass has created or written to."""
        if not self._is_backward():
            self._forward.update(_memory(leaf) for leaf in pytree.tree_leaves(tensors) if isinstance(leaf, FunctionalTensor))

    def _follow(self, func: OpOverload, args: Sequence[Any], result: Any) -> None:
        """Records the op that created a view."""
        source = args[0]
        reasons = self._views[id(source)][1] if id(source) in self._views else ()
        if func is aten.as_strided.default:
            self._strided[id(source)] = source
            _check_place(source)
        if func in _REASONS:
            reasons = (*reasons, functools.partial(_REASONS[func], source, result, *args[1:]))
        if reasons:
            for view in pytree.tree_leaves(result):
                self._views[id(view)] = view, reasons


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Within the context, `LostWrites` ignores ops: they are a compiler's own, not the program's."""
    if isinstance(private.innermost_mode(), LostWrites):
        with private.without_innermost_mode():
            yield
    else:
        yield


@functools.cache
def _is_composite(func: OpOverload, device: str) -> bool:
    """True if an op is decomposed for lack of a kernel, and is not just a query of a tensor's metadata."""
    return func not in FunctionalTensor.metadata_fns and private.is_composite(func, device)


@functools.cache
def _written(func: OpOverload) -> tuple[tuple[int, str], ...]:
    """Returns the positions and names of the arguments that an op writes to."""
    arguments = enumerate(func._schema.arguments)
    return tuple((place, item.name) for place, item in arguments if item.alias_info is not None and item.alias_info.is_write)


@functools.cache
def _is_view(func: OpOverload) -> bool:
    return any(item.alias_info is not None and not item.alias_info.is_write for item in func._schema.returns)


def _memory(tensor: FunctionalTensor) -> StorageWeakRef:
    """Returns a tensor's storage, which it shares with its views."""
    return StorageWeakRef(tensor.elem.untyped_storage())


def _check_place(tensor: FunctionalTensor) -> None:
    """Checks that the value of a tensor on which `as_strided` was called has eager mode's memory layout.

    Raises:
        LostWrite: It does not.
    """
    with disable_functional_mode():
        value = private.functional_value(tensor)
    with disable_proxy_modes_tracing():  # this arithmetic on sizes must not become part of the program
        steps = [(size, *pair) for size, *pair in zip(tensor.shape, value.stride(), tensor.stride(), strict=True)]
        same = all(statically_known_true(size == 1) or statically_known_true(mine == theirs) for size, mine, theirs in steps)
        same = same and statically_known_true(value.storage_offset() == tensor.storage_offset())
    if not same:
        raise LostWrite(
            "it calls aten.as_strided on a tensor that it writes to, and the strides of that tensor differ from those in eager mode"
        )


def _of_windows(source: torch.Tensor, view: torch.Tensor, dim: int, size: int, step: int) -> str | None:
    """Returns a reason if the windows do not partition the whole dimension in order. torch refuses a single window that would overlap the
    next.
    """
    length, count = (source.shape[dim], view.shape[dim]) if source.dim() else (1, 1)
    if guard_or_false(size * count == length) and guard_or_false(size <= step):
        return None
    return f"aten.unfold made with windows of size {size} at every {step} positions"


def _of_growth(source: torch.Tensor, view: torch.Tensor, *_: Any) -> str | None:
    """Returns a reason if a dimension was expanded."""
    before = (*[1] * (view.dim() - source.dim()), *source.shape)
    if all(guard_or_false(old == new) for old, new in zip(before, view.shape, strict=True)):
        return None
    return f"aten.expand made with shape {tuple(view.shape)} from shape {tuple(source.shape)}"


def _of_places(source: torch.Tensor, view: torch.Tensor, *_: Any) -> str | None:
    """Returns a reason if elements share memory."""
    if not free_unbacked_symbols((*view.shape, *view.stride())) and not shares_with_itself(view):
        return None
    return f"aten.as_strided made with overlapping elements: shape {tuple(view.shape)}, strides {view.stride()}"


_REASONS: dict[OpOverload, Callable[..., str | None]] = {
    aten.as_strided.default: _of_places,
    aten.expand.default: _of_growth,
    aten.unfold.default: _of_windows,
}
