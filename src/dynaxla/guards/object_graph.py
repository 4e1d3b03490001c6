"""All objects that can be reached from some roots: closures, globals, modules, optimizers, and the objects that these refer to.

A *place* is an entry of a container, such as a dict, a list or a closure's cell. The graph has all places with their objects at the time of
a *walk* (object_walker.py). A comparison with the current objects shows the changes that a function has made, and whether a recorded
program is still valid.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..runtime.layout import ORDINARY
from ..runtime.private import storage_id
from .code_names import ExecutedCode
from .fingerprints import NO_FINGERPRINT, BufferContents, fingerprint, identity_of, restore_contents
from .numpy_arrays import tensor_of
from .reference_checks import Identities, ReferenceChecks
from .slots import Holder, Place, types_of


@dataclass
class ObjectGraph:
    """All objects that can be reached from the roots.

    Attributes:
        base: the graph of an earlier walk. This graph has only objects that `base` does not have.
        roots: the objects to start from, by name.
        holders: mutable containers with their entries at the walk, by path.
        tensors: tensors by path.
        optimizers: optimizers by path.
        paths: the paths of objects, by id.
        objects: objects by path.
        metas: `meta` of each tensor, in the order of `tensors`.
        sharing: for each tensor, the index of the first tensor in the same memory; see `sharing_now`.
        gradients: paths of tensors that are gradients of other tensors.
        parts: parts of immutable objects (bound methods, partials, slices), by path.
        values: arrays, bytearrays and memoryviews with their contents at the walk, by path.
        references: weak references with their referents, by path.
        empty: attribute dicts of tensors that were empty at the walk.
        views: read-only views of dicts, by path.
        incomparable: type names of objects that can be compared neither by value nor by identity, by path.
        codes: the code of all functions.
        names: the names that the code of these functions uses.
        repeated: ids of objects that several places refer to.
        is_outdated: True while gradients are released (`release_gradients`).
        identities: the objects' classes and attribute dicts, and the tensors' hooks.
    """

    base: ObjectGraph | None = None
    roots: Mapping[str, Any] = field(default_factory=dict)
    holders: dict[str, Holder] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    metas: list[tuple[Any, ...]] = field(default_factory=list)
    sharing: list[tuple[int, int]] = field(default_factory=list)
    gradients: set[str] = field(default_factory=set)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    values: dict[str, tuple[Any, BufferContents]] = field(default_factory=dict)
    references: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    empty: list[dict[str, Any]] = field(default_factory=list)
    views: dict[str, Holder] = field(default_factory=dict)
    incomparable: dict[str, str] = field(default_factory=dict)
    codes: set[types.CodeType] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    repeated: set[int] = field(default_factory=set)
    is_outdated: bool = False
    identities: Identities = field(init=False)
    _checks: ReferenceChecks | None = None
    _shared: set[str] | None = None  # paths of tensors that share memory with others

    def path_of(self, value: Any) -> str | None:
        """Returns the path of an object of this graph or of its base; None for another object."""
        path = self.paths.get(id(value))
        return path if path is not None or self.base is None else self.base.path_of(value)

    def knows(self, path: str) -> bool:
        """True if this graph or its base has an object at this path."""
        return path in self.objects or (self.base is not None and self.base.knows(path))

    def object_at(self, path: str) -> Any:
        """Returns the object at a path. Raises: KeyError for an unknown path."""
        return self.objects[path] if path in self.objects or self.base is None else self.base.object_at(path)

    def input_at(self, path: str) -> torch.Tensor:
        """Returns the tensor at a path, or a tensor that shares the memory of the array there."""
        if path in self.values:
            return tensor_of(self.values[path][0])
        return self.tensors[path] if path in self.tensors or self.base is None else self.base.input_at(path)

    def number_at(self, place: Place) -> Any:
        """Returns the number, or the tuple of numbers, that a place contains now."""
        path, key = place
        holders = next(graph.holders for graph in self._chain() if path in graph.holders)
        return holders[path].get(key)

    @property
    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """NumPy arrays by path."""
        return {path: value for path, (value, _) in self.values.items() if isinstance(value, np.ndarray)}

    @property
    def holders_of_values(self) -> dict[str, Any]:
        """Arrays and other objects with values that Python can read and write without torch, by path."""
        return {path: value for path, (value, _) in self.values.items()}

    def unreached(self, executed: ExecutedCode) -> list[types.CodeType]:
        """Returns the untrusted code that has run, but belongs to no function of this graph or of its base."""
        graphs: Iterator[ObjectGraph] = self._chain()
        reached = set().union(*(graph.codes for graph in graphs))
        return [code for code in executed.codes if code not in reached and code not in executed.trusted]

    def _chain(self) -> Iterator[ObjectGraph]:
        """Yields this graph, its base, the base of its base, and so on."""
        yield self
        if self.base is not None:
            yield from self.base._chain()

    def is_unchanged(self, inputs: Collection[Place] = frozenset(), arrays: Collection[str] = frozenset()) -> bool:
        """True if all places have the same objects, and all objects the same contents, as at the walk.

        Args:
            inputs: places of numbers that may have changed.
            arrays: paths of arrays whose values, but not shapes, may have changed.
        """
        if self.is_outdated:
            return False
        if self._checks is None or self._checks.inputs != inputs or self._checks.arrays != arrays:
            self._checks = ReferenceChecks(self, inputs, arrays)
        return self._checks.is_unchanged()

    def metas_now(self, paths: Iterable[str] | None = None) -> list[tuple[Any, ...]]:
        """Returns the current `meta` of the tensors at these paths (None: of all tensors), in the order of the walk."""
        return list(map(meta, self.tensors.values() if paths is None else map(self.tensors.__getitem__, paths)))

    def sharing_now(self) -> list[tuple[int, int]]:
        """Returns, for each tensor, the index of the first tensor on its storage, and its storage offset (0 for that first tensor)."""
        storages = storages_of(self.tensors.values())
        first = dict(zip(reversed(storages), range(len(storages) - 1, -1, -1), strict=True))
        return [
            (first[storage], tensor.storage_offset() if first[storage] != index else 0)
            for index, (storage, tensor) in enumerate(zip(storages, self.tensors.values(), strict=True))
        ]

    def restore(self) -> None:
        """Gives every container its entries at the walk."""
        for holder in self.holders.values():
            holder.restore()

    def restore_values(self, quiet: Collection[str]) -> list[str]:
        """Restores the values of arrays, except for arrays at the paths `quiet`. Returns: the paths of the arrays that had changed."""
        return [path for path, (value, values) in self.values.items() if path not in quiet and restore_contents(value, values)]

    def release_gradients(self, places: Iterable[str], keep: Collection[str]) -> dict[str, dict[str, tuple[Any, ...]]]:
        """Releases gradients that are about to be replaced, so that their memory is free before the program runs.

        A gradient stays if other places refer to the gradient or one of its inner tensors, if one of these shares memory, or if its path
        is in `keep`. After a release the graph is outdated, until `accept_gradients`.

        Args:
            places: the paths of the holders of gradients.
            keep: paths of tensors that must not be released.

        Returns: for the path of each holder with a released gradient: `meta` of the gradient and of its inner tensors, by their paths.
        """
        released = {}
        if self._shared is None:
            tensors = Counter(first for first, _ in self.sharing)
            self._shared = {path for path, (first, _) in zip(self.tensors, self.sharing, strict=True) if tensors[first] > 1}
        for place in places:
            holder = self.holders.get(place)
            gradient = holder.items["grad"] if holder is not None else None
            if holder is None or gradient is None:
                continue
            pieces = self._pieces(gradient)
            if not pieces or any(path in keep or path in self._shared or id(piece) in self.repeated for path, piece in pieces.items()):
                continue
            self.is_outdated = True
            released[place] = {path: meta(piece) for path, piece in pieces.items()}
            for piece in pieces.values():
                del self.paths[id(piece)]
            holder.put("grad", None)
            holder.items["grad"] = None
            self._replace_pieces(dict.fromkeys(pieces))
        self._forget_compared_gradients()
        return released

    def _pieces(self, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns a gradient and its inner tensors, by path; {} if one of these has a gradient, or if the inner tensors are unknown."""
        path = self.paths.get(id(gradient), "")
        below, parts = self.holders.get(f"{path}.grad"), self.holders.get(f"{path} parts")
        if path not in self.gradients or below is None or gradient.grad is not None:
            return {}
        wrapped = [part for part in parts.items.values() if isinstance(part, torch.Tensor)] if parts is not None else []
        found = {path: gradient}
        for part in wrapped:
            inside = self._pieces(part)
            if not inside:
                return {}
            found |= inside
        return found if wrapped or type(gradient) in ORDINARY else {}

    def _matching_pieces(self, path: str, gradient: Any, expected: Mapping[str, tuple[Any, ...]]) -> dict[str, torch.Tensor]:
        """Returns a new gradient and its inner tensors, by path; {} if their metadata differ from those of the released gradient.

        Args:
            path: the path of the released gradient.
            gradient: the new gradient.
            expected: `meta` of the released gradient and of its inner tensors, by path.
        """
        if not isinstance(gradient, torch.Tensor) or meta(gradient) != expected[path] or gradient.grad is not None:
            return {}
        found = {path: gradient}
        for name, before in self.holders[f"{path} parts"].items.items() if f"{path} parts" in self.holders else ():
            part = getattr(gradient, name)
            if f"{path}.{name}" in expected:
                inside = self._matching_pieces(f"{path}.{name}", part, expected)
                if not inside:
                    return {}
                found |= inside
            elif type(part) is not type(before) or part != before:
                return {}
        return found

    def _replace_pieces(self, pieces: Mapping[str, torch.Tensor | None]) -> None:
        """Replaces a gradient and its inner tensors in this graph by `pieces`: new tensors, or None. Other parts of wrappers stay."""
        for path, piece in pieces.items():
            self.holders[f"{path}.grad"].target = self.objects[path] = self.tensors[path] = piece
            if (parts := self.holders.get(f"{path} parts")) is not None:
                parts.target.owner = piece
                for name, part in parts.items.items():
                    if f"{path}.{name}" in pieces:
                        parts.items[name] = pieces[f"{path}.{name}"]
                    elif piece is not None:
                        parts.put(name, part)

    def gradients_at(self, places: Iterable[str]) -> dict[Place, Any]:
        """Returns the gradients in these places, for `Snapshot.put`."""
        return {(place, "grad"): self.holders[place].items["grad"] for place in places if place in self.holders}

    def accept_gradients(self, released: Mapping[str, Mapping[str, tuple[Any, ...]]]) -> None:
        """Adds the gradients that have replaced released gradients. If all have the same metadata, the graph is no longer outdated."""
        replaced: set[str] = set()
        is_complete = True
        taken = set(storages_of(tensor for tensor in self.tensors.values() if tensor is not None))
        for place, expected in released.items():
            holder = self.holders[place]
            pieces = self._matching_pieces(next(iter(expected)), holder.target.grad, expected)
            storages = set(map(storage_of, pieces.values()))
            if not pieces or len(storages) < len(pieces) or storages & taken:
                is_complete = False
                continue
            taken |= storages
            holder.items["grad"] = holder.target.grad
            self._replace_pieces(pieces)
            self.paths.update((id(piece), path) for path, piece in pieces.items())
            replaced.update(pieces)
        self.is_outdated = self.is_outdated and not is_complete
        self._forget_compared_gradients()
        if self._checks is not None and is_complete:
            self._checks.accept_places(replaced)

    def _forget_compared_gradients(self) -> None:
        if self._checks is not None:
            self._checks.renew_gradients()

    def facts(self, inputs: Collection[Place] = (), arrays: Collection[str] = ()) -> dict[str, Any]:
        """Returns the facts that a recording depends on, comparable with the facts of another graph.

        Args:
            inputs: entries (path, key), numbers or tuples of numbers, whose types matter, but not their values.
            arrays: paths of arrays whose dtypes and shapes matter, but not their values.
        """
        found: dict[str, Any] = {name: self._fact(value) for name, value in self.roots.items()}
        for path, holder in self.holders.items():
            found[path] = [
                (self._key(key), ("input", types_of(value)) if (path, key) in inputs else self._fact(value))
                for key, value in holder.items.items()
            ]
        for path, parts in self.parts.items():
            found[f"{path} parts"] = [(name, self._fact(value)) for name, value in parts.items()]
        for path, (_, values) in self.values.items():
            found[f"values {path}"] = values.metadata if path in arrays else values
        storages = self.base._storages() if self.base is not None and self.tensors else {}
        for path, tensor in self.tensors.items():
            storage = storages.setdefault(storage_of(tensor), path)
            found[f"tensor {path}"] = (*meta(tensor), storage, tensor.storage_offset() if storage != path else 0)
        return found

    def _storages(self) -> dict[int, str]:
        """Returns the path of the first tensor on each storage, by the storage's id."""
        return dict(zip(reversed(storages_of(self.tensors.values())), reversed(self.tensors), strict=True))

    def _fact(self, value: Any) -> Any:
        """Returns a fingerprint of a value: its content, its class and path, or its identity."""
        if (found := fingerprint(value)) is not NO_FINGERPRINT:
            return found
        if issubclass(type(value), (tuple, frozenset)):  # isinstance reads __class__, which may warn
            items = tuple.__iter__(value) if issubclass(type(value), tuple) else frozenset.__iter__(value)
            path = None if type(value) in (tuple, frozenset, torch.Size) else self.path_of(value)
            return type(value), path, tuple(map(self._fact, items))
        path = self.path_of(value)
        return type(value), identity_of(value) if path is None or path in self.incomparable else path

    def _key(self, key: Any) -> Any:
        """Returns a fingerprint of a key of a container."""
        if (found := fingerprint(key)) is not NO_FINGERPRINT:
            return found if type(key) not in (str, int) else key
        return self.path_of(key) or identity_of(key)


def storage_of(tensor: torch.Tensor) -> int:
    """Returns the id of a tensor's storage; the id of the tensor if it is not strided."""
    return storage_id(tensor) if tensor.layout == torch.strided else id(tensor)


def storages_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Returns `storage_of` for each tensor. The loop runs in C, because every call of a step has thousands of tensors."""
    tensors = list(tensors)
    try:
        return list(map(storage_id, tensors))
    except RuntimeError:  # one of them has no storage
        return list(map(storage_of, tensors))


def meta(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns the metadata of a tensor on which a recording depends."""
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return type(tensor), tensor.shape, strides, tensor.dtype, tensor.device, tensor.requires_grad, tensor.is_leaf
