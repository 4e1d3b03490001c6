"""Fast checks that thousands of objects are unchanged since a walk (object_walker.py): all their references are compared at once.

CPython lists the objects that some objects refer to (`gc.get_referents`). If the pointers in this list, compared as bytes, are equal to the
pointers at the walk, every entry is the same object. If the bytes differ, the relevant entries are compared one by one, because only an
irrelevant entry may have changed.
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
from .slots import Attributes, ClassDict, Container, Namespace, Place
from .trusted_code import HEAP_TYPE, is_trusted_class

if TYPE_CHECKING:
    from .object_graph import ObjectGraph

_is_leaf = operator.attrgetter("is_leaf")
# If an entry was changed and changed back, the version of its dict differs although no entry does. The versions are stored again only after
# this many comparisons of entries, because storing the versions costs as much as about 50 such comparisons.
_MIN_COMPARISONS = 50


def _pointers(values: list[Any]) -> Any:
    """Returns the addresses of objects as bytes. Two results are comparable while the objects of the first result are alive."""
    return ctypes.string_at(ctypes.c_void_p.from_address(id(values) + _ITEMS).value or 0, 8 * len(values)) if values else b""


def _ids(values: list[Any]) -> Any:
    return list(map(id, values))


# The offset in bytes of the pointer to a list's items in CPython: after the length. Other Python implementations use `_ids`.
_ITEMS = object.__basicsize__ + 8
_PROBE = [object(), None, object()]
_IS_CPYTHON = sys.implementation.name == "cpython" and list.__basicsize__ == _ITEMS + 16
if not _IS_CPYTHON or b"".join(id(item).to_bytes(8, sys.byteorder) for item in _PROBE) != _pointers(_PROBE):
    _pointers = _ids


class Identities:
    """The classes and attribute dicts of objects, and the hooks of tensors, at the time of a walk."""

    def __init__(self, graph: ObjectGraph) -> None:
        gradients = {id(graph.tensors[path]) for path in graph.gradients if path in graph.tensors}
        self._targets = [value for value in graph.objects.values() if _has_heap_type(value) and not _is_container(value)]
        self._targets += [tensor for tensor in graph.tensors.values() if id(tensor) not in gradients]
        self._containers = [value for value in graph.objects.values() if _has_heap_type(value) and _is_container(value)]
        self._empty_attribute_dicts = graph.empty_attribute_dicts
        self._at_walk = self._now()

    def _now(self) -> Any:
        of_containers = [(type(value), getattr(value, "__dict__", None)) for value in self._containers]
        return _pointers(gc.get_referents(*self._targets)), _pointers(list(chain.from_iterable(of_containers)))

    def are_unchanged(self) -> bool:
        """True if all classes, attribute dicts and hooks are the same objects as at the walk."""
        return not any(self._empty_attribute_dicts) and bool(self._at_walk == self._now())


def _is_container(value: Any) -> bool:
    """True for an object that refers to entries, besides its class and its attribute dict."""
    return isinstance(value, (dict, list, set, deque))


class ReferenceChecks:
    """Checks that the objects of a graph are unchanged. The constructor prepares data for fast checks.

    Args:
        graph: the graph.
        inputs: places whose numbers may change.
        arrays: paths of arrays whose values, but not shapes, may change.
    """

    def __init__(self, graph: ObjectGraph, inputs: Collection[Place], arrays: Collection[str]) -> None:
        self.inputs, self.arrays = inputs, arrays
        self._graph = graph
        self._input_keys = {path: [key for place, key in inputs if place == path] for path, _ in inputs}
        parts = {f"{path} parts" for path in graph.gradients}
        of_tensors = {
            path: container
            for path, container in graph.containers.items()
            if path in parts or (isinstance(container.target, torch.Tensor) and container.items)
        }
        # The gradients of parameters are replaced at every step, the gradients of other tensors hardly ever.
        replaced = {
            path
            for path, container in of_tensors.items()
            if path in parts or path.removesuffix(".grad") in graph.gradients or container.items["grad"] is not None
        }
        self._gradients = _Entries([container for path, container in of_tensors.items() if path in replaced])
        self._other_gradients = _Entries([container for path, container in of_tensors.items() if path not in replaced])
        self._containers = [
            (container, self._input_keys.get(path, ()))
            for path, container in graph.containers.items()
            if not isinstance(container.target, (torch.Tensor, Namespace)) and path not in parts
        ]
        self._always = [(container, input_keys) for container, input_keys in self._containers if input_keys or not _is_listed(container)]
        self._always += [(container, ()) for container in graph.derived_containers.values()]
        listed = [container for container, input_keys in self._containers if not input_keys and _is_listed(container)]
        self._targets = [item for container in listed for item in _referrers(container)]
        # Most entries are attributes of modules. For them, an unchanged version of the attribute dict proves that no entry has changed.
        self._dicts = [container.target for container in listed if type(container.target) is dict and container.items]
        dict_ids = set(map(id, self._dicts))
        self._unversioned = [item for item in self._targets if id(item) not in dict_ids]
        self._keys = [_keys(container.target) for container in listed if isinstance(container.target, dict) and container.items]
        # Keys are compared too, because a value under another key may leave the list of values as it was.
        self._unversioned_keys = [
            _keys(container.target)
            for container in listed
            if isinstance(container.target, dict) and container.items and id(container.target) not in dict_ids
        ]
        self._store_referents()
        self._was_unchanged = all(container.is_unchanged(input_keys) for container, input_keys in self._containers)  # since the walk
        self._gather_namespaces([container for container in graph.containers.values() if isinstance(container.target, Namespace)])
        self._gather_tensors()

    def is_unchanged(self) -> bool:
        """True if all entries, objects and tensors of the graph are as they were at the walk."""
        return (
            self._was_unchanged
            and self._graph.identities.are_unchanged()
            and self._are_entries_unchanged()
            and self._are_namespaces_unchanged()
            and all(container.is_unchanged(input_keys) for container, input_keys in self._always)
            and self._are_tensors_unchanged()
            and all(reference() is target for reference, target in self._graph.weak_references.values())
            and all(map(self._has_values, self._graph.buffers_at_walk))
        )

    def _has_values(self, path: str) -> bool:
        value, values = self._graph.buffers_at_walk[path]
        if path in self.arrays:
            return buffer_contents(value, with_data=False) == BufferContents(values.metadata, b"")
        return values.data is not None and buffer_contents(value) == values

    # Containers and objects.

    def _store_referents(self) -> None:
        self._referents_at_walk = _referents(self._targets, self._keys)
        self._unversioned_referents_at_walk = _referents(self._unversioned, self._unversioned_keys)
        self._store_dict_versions()

    def _store_dict_versions(self) -> None:
        self._dict_check = DictCheck(self._dicts)
        self._comparisons = 0

    def _are_entries_unchanged(self) -> bool:
        self._comparisons += 1
        if (
            self._dict_check.are_unchanged()
            and _referents(self._unversioned, self._unversioned_keys) == self._unversioned_referents_at_walk
        ):
            return True
        if _referents(self._targets, self._keys) == self._referents_at_walk:
            if self._comparisons >= _MIN_COMPARISONS:  # an entry has been changed, and changed back
                self._store_dict_versions()
            return True
        if not all(container.is_unchanged(input_keys) for container, input_keys in self._containers):
            return False
        self._store_referents()  # only an irrelevant entry has changed
        return True

    # Globals.

    def _gather_namespaces(self, containers: Sequence[Container]) -> None:
        filled = [container for container in containers if container.items]
        self._namespaces = [container.target.values for container in filled]
        self._getters = [operator.itemgetter(*container.items, next(iter(container.items))) for container in filled]
        absent = [(container.target.values, container.target.names - container.items.keys()) for container in containers]
        self._disjoint: list[Callable[..., bool]] = [values.keys().isdisjoint for values, names in absent if names]
        self._absent = [names for _, names in absent if names]
        self._globals = _pointers(
            [item for container in filled for item in (*container.items.values(), next(iter(container.items.values())))]
        )

    def _read_globals(self) -> list[Any]:
        return list(chain.from_iterable(map(operator.call, self._getters, self._namespaces)))

    def _are_namespaces_unchanged(self) -> bool:
        try:
            return _pointers(self._read_globals()) == self._globals and all(map(operator.call, self._disjoint, self._absent))
        except KeyError:
            return False

    # Tensors.

    def _gather_tensors(self) -> None:
        tensors = self._graph.tensors
        plain = [path for path, tensor in tensors.items() if _is_plain(tensor)]
        checked = [path for path, tensor in tensors.items() if _is_plain(tensor) or _is_wrapper(tensor)]
        self._checked_paths = None if len(checked) == len(tensors) else checked
        argument_checked = set(checked)
        self._compared_metadata = {
            path: metadata for path, metadata in zip(tensors, self._graph.metadata, strict=True) if path not in argument_checked
        }
        self._argument_check: Any = None
        self._leaf_flags = [metadata[-1] for metadata in self._graph.metadata]
        gradients = self._graph.gradients
        self._non_gradient_paths = [path for path in plain if path not in gradients]
        self._gradient_paths = [path for path in plain if path in gradients]
        self._addresses: tuple[AddressSnapshot, AddressSnapshot] | None = None

    def _are_tensors_unchanged(self) -> bool:
        now = self._graph.tensors
        tensors = list(now.values())
        checked = tensors if self._checked_paths is None else [now[path] for path in self._checked_paths]
        if list(map(_is_leaf, tensors)) != self._leaf_flags:
            return False
        if not self._other_gradients.are_unchanged() or not self._gradients.are_unchanged():
            return False
        if self._compared_metadata and self._graph.current_metadata(self._compared_metadata) != list(self._compared_metadata.values()):
            return False
        if self._argument_check is None or (checked and not self._argument_check.matches(*checked)):
            if self._graph.metadata != self._graph.current_metadata():
                return False
            self._argument_check = ArgumentCheck(checked)
        found = self._addresses_of(self._non_gradient_paths), self._addresses_of(self._gradient_paths)
        if found != self._addresses:
            if self._graph.sharing_now() != self._graph.sharing:
                return False
            self._addresses = found
        return True

    def _addresses_of(self, paths: Sequence[str]) -> AddressSnapshot:
        now = self._graph.tensors
        return address_snapshot([now[path] for path in paths])

    def renew_gradients(self) -> None:
        """Forgets the expected gradients. To be called after gradients, or the graph's entries for gradients, were replaced."""
        self._gradients.renew()

    def accept_addresses(self, replaced: set[str]) -> None:
        """Accepts the addresses of the new gradients at these paths.

        Neither the old nor the new gradients share memory with other tensors.
        """
        if self._addresses is not None:
            are_all = replaced.issuperset(self._gradient_paths)
            self._addresses = (self._addresses[0], self._addresses_of(self._gradient_paths)) if are_all else None


class _Entries:
    """The gradients of tensors, or the inner tensors of gradients, compared by identity."""

    def __init__(self, containers: Sequence[Container]) -> None:
        self._containers = containers
        self.renew()

    def renew(self) -> None:
        """Makes the next comparison expect the entries that the containers then have in `items`."""
        self._expected: Any = None
        self._owners: list[torch.Tensor] = []
        self._names: list[str] = []

    def are_unchanged(self) -> bool:
        if self._expected is None:
            expected = [(_owner(container), name, item) for container in self._containers for name, item in container.items.items()]
            self._owners, self._names = [owner for owner, *_ in expected], [name for _, name, _ in expected]
            self._expected = _pointers([item for *_, item in expected])
        return bool(_pointers(list(map(getattr, self._owners, self._names, repeat(None)))) == self._expected)


def _referents(targets: Sequence[Any], keys: Sequence[Any]) -> Any:
    return _pointers(gc.get_referents(*targets)), _pointers(list(chain.from_iterable(keys)))


def _referrers(container: Container) -> list[Any]:
    """Returns the objects for which `gc.get_referents` lists the entries of a container."""
    target = container.target
    if isinstance(target, Attributes):
        return [target.owner]
    if isinstance(target, ClassDict):
        return [*gc.get_referents(vars(target.kind)), target.kind]
    return [target]


def _is_listed(container: Container) -> bool:
    """True if the values that `gc.get_referents` lists, for a dict together with its keys, show each change of a container's entries."""
    if isinstance(container.target, (dict, types.CellType)) or type(container.target) in (list, set, deque):
        return True
    if isinstance(container.target, Attributes) and isinstance(container.target.owner, types.FunctionType):
        return True
    if isinstance(container.target, Attributes) and not is_trusted_class(type(container.target.owner)):
        return False  # a value may move from slot to slot
    if isinstance(container.target, contextvars.ContextVar):
        return False
    return {id(value) for value in container.items.values()} <= set(map(id, gc.get_referents(*_referrers(container))))


def _keys(target: dict[Any, Any]) -> Any:
    return OrderedDict.keys(target) if isinstance(target, OrderedDict) else dict.keys(target)


def _has_heap_type(value: Any) -> bool:
    """True for an instance of a heap type, such as any class of Python code: its `__class__` can be replaced.

    False for classes, modules and tensors.
    """
    return bool(type(value).__flags__ & HEAP_TYPE) and not isinstance(value, (type, types.ModuleType, torch.Tensor))


def _owner(container: Container) -> Any:
    """Returns the tensor whose gradient, or whose inner tensors, are a container's entries."""
    return container.target.owner if isinstance(container.target, Attributes) else container.target


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in ORDINARY and tensor.layout == torch.strided


def _is_wrapper(tensor: torch.Tensor) -> bool:
    """True for a strided wrapper tensor, such as a DTensor, whose memory is that of its inner tensors."""
    return has_own_dispatch(type(tensor)) and tensor.layout == torch.strided
