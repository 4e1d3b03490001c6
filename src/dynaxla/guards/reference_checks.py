"""Fast checks, within microseconds, that thousands of objects are unchanged: all their references are compared at once.

CPython can list the objects that other objects refer to (`gc.get_referents`). Comparing the pointers in this list as bytes compares the
identity of each entry. If the bytes differ, the entries that matter are compared one by one, because others may have changed.
"""

from __future__ import annotations

import contextvars
import ctypes
import gc
import operator
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Sequence
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch

from ..buffers.addresses import AddressSnapshot, address_snapshot
from ..runtime.guards import ArgumentCheck, DictCheck
from ..runtime.layout import ORDINARY
from .dispatch import has_own_dispatch
from .fingerprints import BufferContents, buffer_contents
from .slots import Attributes, ClassDict, Holder, Namespace, Place

if TYPE_CHECKING:
    from .object_graph import ObjectGraph

_is_leaf = operator.attrgetter("is_leaf")
# Reading the versions of dicts takes as long as about this many comparisons of their entries.
_MIN_LOOKS = 50
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def _pointers(values: list[Any]) -> Any:
    """Returns the addresses of objects as bytes. Two results are comparable while the objects of the first result are alive."""
    return ctypes.string_at(ctypes.c_void_p.from_address(id(values) + _ITEMS).value or 0, 8 * len(values)) if values else b""


def _ids(values: list[Any]) -> Any:
    return list(map(id, values))


# Offset of the pointer to a list's items in CPython: behind the length. Other implementations use `id` of each item.
_ITEMS = object.__basicsize__ + 8
_PROBE = [object(), None, object()]
_IS_CPYTHON = sys.implementation.name == "cpython" and list.__basicsize__ == _ITEMS + 16
if not _IS_CPYTHON or b"".join(id(item).to_bytes(8, sys.byteorder) for item in _PROBE) != _pointers(_PROBE):
    _pointers = _ids


class Identities:
    """The classes and attribute dicts of objects, and the hooks of tensors, at the time of a walk."""

    def __init__(self, walk: ObjectGraph) -> None:
        gradients = {id(walk.tensors[path]) for path in walk.gradients if path in walk.tensors}
        self._targets = [value for value in walk.objects.values() if _has_class_of_python(value) and not _is_container(value)]
        self._targets += [tensor for tensor in walk.tensors.values() if id(tensor) not in gradients]
        self._others = [value for value in walk.objects.values() if _has_class_of_python(value) and _is_container(value)]
        self._empty = walk.empty
        self._found = self._now()

    def _now(self) -> Any:
        others = [(type(value), getattr(value, "__dict__", None)) for value in self._others]
        return _pointers(gc.get_referents(*self._targets)), _pointers(list(chain.from_iterable(others)))

    def are_unchanged(self) -> bool:
        """True if all classes, attribute dicts and hooks are the same objects as at the walk."""
        return not any(self._empty) and bool(self._found == self._now())


def _is_container(value: Any) -> bool:
    """True for a container: an object that refers to entries that may change, besides its class and its attribute dict."""
    return isinstance(value, (dict, list, set, deque))


class ReferenceChecks:
    """Checks that the objects of a graph are unchanged. The constructor prepares data for fast checks.

    Args:
        walk: the graph.
        inputs: places whose numbers may change.
        arrays: paths of arrays whose values, but not shapes, may change.
    """

    def __init__(self, walk: ObjectGraph, inputs: Collection[Place], arrays: Collection[str]) -> None:
        self.inputs, self.arrays = inputs, arrays
        self._walk = walk
        self._free = {path: [key for place, key in inputs if place == path] for path, _ in inputs}
        parts = {f"{path} parts" for path in walk.gradients}
        of_tensors = {
            path: holder
            for path, holder in walk.holders.items()
            if path in parts or (isinstance(holder.target, torch.Tensor) and holder.items)
        }
        # Gradients of parameters are replaced at every step, those of other tensors hardly ever.
        replaced = {
            path
            for path, holder in of_tensors.items()
            if path in parts or path.removesuffix(".grad") in walk.gradients or holder.items["grad"] is not None
        }
        self._gradients = _Entries([holder for path, holder in of_tensors.items() if path in replaced])
        self._other_gradients = _Entries([holder for path, holder in of_tensors.items() if path not in replaced])
        self._holders = [
            (holder, self._free.get(path, ()))
            for path, holder in walk.holders.items()
            if not isinstance(holder.target, (torch.Tensor, Namespace)) and path not in parts
        ]
        self._always = [(holder, free) for holder, free in self._holders if free or not _is_listed(holder)]
        self._always += [(holder, ()) for holder in walk.views.values()]
        listed = [holder for holder, free in self._holders if not free and _is_listed(holder)]
        self._targets = [item for holder in listed for item in _listed(holder)]
        # Most watched objects are attributes of modules: the version of a dict shows that nothing has changed.
        self._dicts = [holder.target for holder in listed if type(holder.target) is dict and holder.items]
        numbered = set(map(id, self._dicts))
        self._others = [item for item in self._targets if id(item) not in numbered]
        self._keys = [_keys(holder.target) for holder in listed if isinstance(holder.target, dict) and holder.items]
        self._other_keys = [_keys(holder.target) for holder in listed if isinstance(holder.target, OrderedDict) and holder.items]
        self._note_places()
        self._was_unchanged = all(holder.is_unchanged(free) for holder, free in self._holders)  # since the walk
        self._gather_namespaces([holder for holder in walk.holders.values() if isinstance(holder.target, Namespace)])
        self._gather_tensors()

    def is_unchanged(self) -> bool:
        """True if all entries, objects and tensors of the graph are as they were at the walk."""
        return (
            self._was_unchanged
            and self._walk.identities.are_unchanged()
            and self._are_places_unchanged()
            and self._are_namespaces_unchanged()
            and all(holder.is_unchanged(free) for holder, free in self._always)
            and self._are_tensors_unchanged()
            and all(reference() is target for reference, target in self._walk.references.values())
            and all(map(self._has_values, self._walk.values))
        )

    def _has_values(self, path: str) -> bool:
        value, values = self._walk.values[path]
        if path in self.arrays:
            return buffer_contents(value, with_data=False) == BufferContents(values.metadata, b"")
        return values.data is not None and buffer_contents(value) == values

    # Containers and objects.

    def _note_places(self) -> None:
        self._referents_at_walk = _referents(self._targets, self._keys)
        self._other_referents_at_walk = _referents(self._others, self._other_keys)
        self._note_dicts()

    def _note_dicts(self) -> None:
        self._check_dicts = DictCheck(self._dicts)
        self._looks = 0

    def _are_places_unchanged(self) -> bool:
        self._looks += 1
        if self._check_dicts.are_unchanged() and _referents(self._others, self._other_keys) == self._other_referents_at_walk:
            return True
        if _referents(self._targets, self._keys) == self._referents_at_walk:
            if self._looks >= _MIN_LOOKS:  # an entry has been changed, and changed back
                self._note_dicts()
            return True
        if not all(holder.is_unchanged(free) for holder, free in self._holders):
            return False
        self._note_places()  # an entry that does not matter has changed
        return True

    # Globals.

    def _gather_namespaces(self, holders: Sequence[Holder]) -> None:
        filled = [holder for holder in holders if holder.items]
        self._namespaces = [holder.target.values for holder in filled]
        self._getters = [operator.itemgetter(*holder.items, next(iter(holder.items))) for holder in filled]
        absent = [(holder.target.values, holder.target.names - holder.items.keys()) for holder in holders]
        self._disjoint: list[Callable[..., bool]] = [values.keys().isdisjoint for values, names in absent if names]
        self._absent = [names for _, names in absent if names]
        self._globals = _pointers([item for holder in filled for item in (*holder.items.values(), next(iter(holder.items.values())))])

    def _read_globals(self) -> list[Any]:
        return list(chain.from_iterable(map(operator.call, self._getters, self._namespaces)))

    def _are_namespaces_unchanged(self) -> bool:
        try:
            return _pointers(self._read_globals()) == self._globals and all(map(operator.call, self._disjoint, self._absent))
        except KeyError:
            return False

    # Tensors.

    def _gather_tensors(self) -> None:
        tensors = self._walk.tensors
        plain = [path for path, tensor in tensors.items() if _is_plain(tensor)]
        checked = [path for path, tensor in tensors.items() if _is_plain(tensor) or _is_wrapper(tensor)]
        self._checked = None if len(checked) == len(tensors) else checked
        known = set(checked)
        self._metas = {path: facts for path, facts in zip(tensors, self._walk.metas, strict=True) if path not in known}
        self._check: Any = None
        self._leaves = [facts[-1] for facts in self._walk.metas]
        gradients = self._walk.gradients
        self._lasting = [path for path in plain if path not in gradients]
        self._replaced = [path for path in plain if path in gradients]
        self._places: tuple[AddressSnapshot, AddressSnapshot] | None = None

    def _are_tensors_unchanged(self) -> bool:
        now = self._walk.tensors
        tensors = list(now.values())
        checked = tensors if self._checked is None else [now[path] for path in self._checked]
        if list(map(_is_leaf, tensors)) != self._leaves:
            return False
        if not self._other_gradients.are_unchanged() or not self._gradients.are_unchanged():
            return False
        if self._metas and self._walk.metas_now(self._metas) != list(self._metas.values()):
            return False
        if self._check is None or (checked and not self._check.matches(*checked)):
            if self._walk.metas != self._walk.metas_now():
                return False
            self._check = ArgumentCheck(checked)
        found = self._places_of(self._lasting), self._places_of(self._replaced)
        if found != self._places:
            if self._walk.sharing_now() != self._walk.sharing:
                return False
            self._places = found
        return True

    def _places_of(self, paths: Sequence[str]) -> AddressSnapshot:
        now = self._walk.tensors
        return address_snapshot([now[path] for path in paths])

    def renew_gradients(self) -> None:
        """Forgets the compared gradients. The caller has replaced gradients, or entries for gradients in the graph."""
        self._gradients.renew()

    def accept_places(self, replaced: set[str]) -> None:
        """Accepts the memory of the new gradients at these paths. Neither the old nor the new gradients share memory with other tensors."""
        if self._places is not None:
            are_all = replaced.issuperset(self._replaced)
            self._places = (self._places[0], self._places_of(self._replaced)) if are_all else None


class _Entries:
    """The gradients of tensors, or the inner tensors of gradients, compared by identity."""

    def __init__(self, holders: Sequence[Holder]) -> None:
        self._holders = holders
        self.renew()

    def renew(self) -> None:
        """Forgets the expected objects, because the holders have others now. The next comparison reads them from the holders."""
        self._expected: Any = None
        self._owners: list[torch.Tensor] = []
        self._names: list[str] = []

    def are_unchanged(self) -> bool:
        if self._expected is None:
            held = [(_owner(holder), name, item) for holder in self._holders for name, item in holder.items.items()]
            self._owners, self._names = [owner for owner, *_ in held], [name for _, name, _ in held]
            self._expected = _pointers([item for *_, item in held])
        return bool(_pointers(list(map(getattr, self._owners, self._names, repeat(None)))) == self._expected)


def _referents(targets: Sequence[Any], keys: Sequence[Any]) -> Any:
    return _pointers(gc.get_referents(*targets)), _pointers(list(chain.from_iterable(keys)))


def _listed(holder: Holder) -> list[Any]:
    """Returns the objects whose `gc.get_referents` contain a holder's entries."""
    target = holder.target
    if isinstance(target, Attributes):
        return [target.owner]
    if isinstance(target, ClassDict):
        return [*gc.get_referents(vars(target.kind)), target.kind]
    return [target]


def _is_listed(holder: Holder) -> bool:
    """True if `gc.get_referents` lists all entries of a holder."""
    if isinstance(holder.target, (dict, types.CellType)) or type(holder.target) in (list, set, deque):
        return True
    if isinstance(holder.target, Attributes) and isinstance(holder.target.owner, types.FunctionType):
        return True
    if isinstance(holder.target, contextvars.ContextVar):
        return False
    return {id(value) for value in holder.items.values()} <= set(map(id, gc.get_referents(*_listed(holder))))


def _keys(target: dict[Any, Any]) -> Any:
    return OrderedDict.keys(target) if isinstance(target, OrderedDict) else dict.keys(target)


def _has_class_of_python(value: Any) -> bool:
    return bool(type(value).__flags__ & _HEAP_TYPE) and not isinstance(value, (type, types.ModuleType, torch.Tensor))


def _owner(holder: Holder) -> Any:
    """Returns the tensor whose gradient, or whose inner tensors, are a holder's entries."""
    return holder.target.owner if isinstance(holder.target, Attributes) else holder.target


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in ORDINARY and tensor.layout == torch.strided


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """True for a strided wrapper tensor, such as a DTensor, whose memory is that of its inner tensors."""
    return has_own_dispatch(type(tensor)) and tensor.layout == torch.strided
