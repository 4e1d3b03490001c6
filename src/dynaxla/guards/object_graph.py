"""All objects that can be reached from some roots: closures, globals, modules, optimizers, and the objects that these refer to.

A *walk* (object_walker.py) makes the graph. The graph has all containers, such as dicts, lists and closure cells, with their entries at the
time of the walk. A *place* (slots.py) is an entry of a container. A comparison with the current entries shows the changes that a function
has made, and whether a recorded program is still valid.
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
from .slots import Container, Place, types_of


@dataclass
class ObjectGraph:
    """All objects that can be reached from the roots.

    Attributes:
        base: the graph of an earlier walk, whose objects this graph does not have.
        roots: the objects to start from, by name.
        containers: mutable containers with their entries at the walk, by path.
        tensors: tensors by path.
        optimizers: optimizers by path.
        paths: the paths of objects, by id.
        objects: objects by path.
        metadata: `metadata_of` of each tensor, in the order of `tensors`.
        sharing: the result of `sharing_now` at the walk.
        gradients: paths of tensors that are gradients of other tensors.
        parts: for each immutable object with parts (a bound method, partial or slice), by path: its parts by name.
        buffers_at_walk: NumPy and Python arrays, bytearrays and memoryviews, each with its contents at the walk, by path.
        weak_references: weak references, each with its referent, by path.
        empty_attribute_dicts: the attribute dicts of tensors, if they were empty at the walk.
        derived_containers: read-only views of dicts, and settings of loggers, by path. Their entries are read anew for each comparison.
        incomparable: type names of objects that can be compared neither by value nor by identity, by path.
        codes: the code of all functions.
        names: the names that the code of these functions uses.
        aliased_ids: the ids of objects that several places refer to.
        compares_offsets: True if the code reads the distance of tensors from the start of their storages.
        reads_by_name: True if the graph has an object such as an attrgetter, which reads attributes that no code names.
        is_outdated: True while gradients are released (`release_gradients`).
        identities: the objects' classes and attribute dicts, and the tensors' hooks.
    """

    base: ObjectGraph | None = None
    roots: Mapping[str, Any] = field(default_factory=dict)
    containers: dict[str, Container] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    metadata: list[tuple[Any, ...]] = field(default_factory=list)
    sharing: list[tuple[int, int]] = field(default_factory=list)
    gradients: set[str] = field(default_factory=set)
    parts: dict[str, dict[str, Any]] = field(default_factory=dict)
    buffers_at_walk: dict[str, tuple[Any, BufferContents]] = field(default_factory=dict)
    weak_references: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    empty_attribute_dicts: list[dict[str, Any]] = field(default_factory=list)
    derived_containers: dict[str, Container] = field(default_factory=dict)
    incomparable: dict[str, str] = field(default_factory=dict)
    codes: set[types.CodeType] = field(default_factory=set)
    names: set[str] = field(default_factory=set)
    aliased_ids: set[int] = field(default_factory=set)
    compares_offsets: bool = False
    reads_by_name: bool = False
    is_outdated: bool = False
    identities: Identities = field(init=False)
    _checks: ReferenceChecks | None = None
    _shared_memory_paths: set[str] | None = None  # paths of tensors that share memory with others

    def path_of(self, value: Any) -> str | None:
        """Returns the path of an object of this graph or of its base; None for another object."""
        path = self.paths.get(id(value))
        return path if path is not None or self.base is None else self.base.path_of(value)

    def has_path(self, path: str) -> bool:
        """True if this graph or its base has an object at this path."""
        return path in self.objects or (self.base is not None and self.base.has_path(path))

    def object_at(self, path: str) -> Any:
        """Returns the object at a path. Raises: KeyError for an unknown path."""
        return self.objects[path] if path in self.objects or self.base is None else self.base.object_at(path)

    def input_at(self, path: str) -> torch.Tensor:
        """Returns the tensor at a path, or a tensor that shares the memory of the array there."""
        if path in self.buffers_at_walk:
            return tensor_of(self.buffers_at_walk[path][0])
        return self.tensors[path] if path in self.tensors or self.base is None else self.base.input_at(path)

    def number_at(self, place: Place) -> Any:
        """Returns the number, or the tuple of numbers, that a place contains now."""
        path, key = place
        containers = next(graph.containers for graph in self._chain() if path in graph.containers)
        return containers[path].get(key)

    @property
    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """NumPy arrays by path."""
        return {path: value for path, (value, _) in self.buffers_at_walk.items() if isinstance(value, np.ndarray)}

    @property
    def buffer_objects(self) -> dict[str, Any]:
        """Arrays and other objects with values that Python can read and write without torch, by path."""
        return {path: value for path, (value, _) in self.buffers_at_walk.items()}

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

    def current_metadata(self, paths: Iterable[str] | None = None) -> list[tuple[Any, ...]]:
        """Returns the current metadata (`metadata_of`) of the tensors at these paths; None: of all tensors, in the order of the walk."""
        return list(map(metadata_of, self.tensors.values() if paths is None else map(self.tensors.__getitem__, paths)))

    def sharing_now(self) -> list[tuple[int, int]]:
        """Returns two numbers for each tensor: the index of the first tensor on its storage, and `_position`."""
        tensors = list(self.tensors.values())
        storages = storages_of(tensors)
        first = dict(zip(reversed(storages), range(len(storages) - 1, -1, -1), strict=True))
        return [
            (first[storage], self._position(tensors[first[storage]], tensor)) for storage, tensor in zip(storages, tensors, strict=True)
        ]

    def _position(self, first: torch.Tensor, tensor: torch.Tensor) -> int:
        """Returns the distance of a tensor from the first tensor on its storage, or from the storage's start, in bytes."""
        if first is tensor and not self.compares_offsets:
            return 0
        return _distance(first, tensor) if first is not tensor else _offset(tensor)

    def restore(self) -> None:
        """Gives every container its entries at the walk."""
        for container in self.containers.values():
            container.restore()

    def restore_values(self, skipped: Collection[str]) -> list[str]:
        """Restores the values of arrays, except for arrays at the paths `skipped`. Returns: the paths of the arrays that had changed."""
        return [path for path, (value, values) in self.buffers_at_walk.items() if path not in skipped and restore_contents(value, values)]

    def release_gradients(self, paths: Iterable[str], keep: Collection[str]) -> dict[str, dict[str, tuple[Any, ...]]]:
        """Releases gradients that are about to be replaced, so that their memory is free before the program runs.

        A gradient may be a wrapper with inner tensors, such as a DTensor. It stays if other places refer to one of these tensors, if one
        shares memory with another tensor, or if the path of one is in `keep`. The graph is outdated from then until `accept_gradients`.

        Args:
            paths: the paths of the containers whose entry "grad" is about to be replaced.
            keep: paths of tensors that must not be released.

        Returns: for each container with a released gradient, by path: the metadata of the gradient and of its inner tensors, by path.
        """
        released = {}
        if self._shared_memory_paths is None:
            tensors = Counter(first for first, _ in self.sharing)
            self._shared_memory_paths = {path for path, (first, _) in zip(self.tensors, self.sharing, strict=True) if tensors[first] > 1}
        for container_path in paths:
            container = self.containers.get(container_path)
            gradient = container.items["grad"] if container is not None else None
            if container is None or gradient is None:
                continue
            pieces = self._pieces(gradient)
            if not pieces or any(
                path in keep or path in self._shared_memory_paths or id(piece) in self.aliased_ids for path, piece in pieces.items()
            ):
                continue
            self.is_outdated = True
            released[container_path] = {path: metadata_of(piece) for path, piece in pieces.items()}
            for piece in pieces.values():
                del self.paths[id(piece)]
            container.put("grad", None)
            container.items["grad"] = None
            self._replace_pieces(dict.fromkeys(pieces))
        self._forget_compared_gradients()
        return released

    def _pieces(self, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns a gradient and its inner tensors, by path.

        Returns {} if one of these tensors has a gradient of its own, or if the inner tensors of a tensor subclass are unknown.
        """
        path = self.paths.get(id(gradient), "")
        own_gradient, parts = self.containers.get(f"{path}.grad"), self.containers.get(f"{path} parts")
        if path not in self.gradients or own_gradient is None or gradient.grad is not None:
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
        """Returns a new gradient and its inner tensors, by path; {} if their metadata differs from the metadata of the released gradient.

        Args:
            path: the path of the released gradient.
            gradient: the new gradient.
            expected: the metadata of the released gradient and of its inner tensors, by path.
        """
        if not isinstance(gradient, torch.Tensor) or metadata_of(gradient) != expected[path] or gradient.grad is not None:
            return {}
        found = {path: gradient}
        for name, before in self.containers[f"{path} parts"].items.items() if f"{path} parts" in self.containers else ():
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
        """Replaces a gradient and its inner tensors in this graph.

        A wrapper's parts that are no tensors, such as the `_spec` of a DTensor, stay.

        Args:
            pieces: by path, the new tensors; None for a gradient that is released.
        """
        for path, piece in pieces.items():
            self.containers[f"{path}.grad"].target = self.objects[path] = self.tensors[path] = piece
            if (parts := self.containers.get(f"{path} parts")) is not None:
                parts.target.owner = piece
                for name, part in parts.items.items():
                    if f"{path}.{name}" in pieces:
                        parts.items[name] = pieces[f"{path}.{name}"]
                    elif piece is not None:
                        parts.put(name, part)

    def gradients_at(self, paths: Iterable[str]) -> dict[Place, Any]:
        """Returns the entries "grad" of the containers at these paths, by place, for `Snapshot.put`."""
        return {(path, "grad"): self.containers[path].items["grad"] for path in paths if path in self.containers}

    def accept_gradients(self, released: Mapping[str, Mapping[str, tuple[Any, ...]]]) -> None:
        """Adds the gradients that have replaced released gradients.

        Then the graph is no longer outdated, unless metadata differ or gradients share memory with other tensors.

        Args:
            released: the result of `release_gradients`.
        """
        replaced: set[str] = set()
        is_complete = True
        taken = set(storages_of(tensor for tensor in self.tensors.values() if tensor is not None))
        for container_path, expected in released.items():
            container = self.containers[container_path]
            pieces = self._matching_pieces(next(iter(expected)), container.target.grad, expected)
            storages = set(map(storage_of, pieces.values()))
            if not pieces or len(storages) < len(pieces) or storages & taken:
                is_complete = False
                continue
            taken |= storages
            container.items["grad"] = container.target.grad
            self._replace_pieces(pieces)
            self.paths.update((id(piece), path) for path, piece in pieces.items())
            replaced.update(pieces)
        self.is_outdated = self.is_outdated and not is_complete
        self._forget_compared_gradients()
        if self._checks is not None and is_complete:
            self._checks.accept_addresses(replaced)

    def _forget_compared_gradients(self) -> None:
        if self._checks is not None:
            self._checks.renew_gradients()

    def facts(self, inputs: Collection[Place] = (), arrays: Collection[str] = ()) -> dict[str, Any]:
        """Returns the facts that a recording depends on, comparable with the facts of another graph.

        Args:
            inputs: places of numbers, or of tuples of numbers. The types of these numbers are facts, but not their values.
            arrays: paths of arrays whose metadata, such as dtype and shape, is a fact, but not their values.
        """
        found: dict[str, Any] = {name: self._fact(value) for name, value in self.roots.items()}
        for path, container in self.containers.items():
            found[path] = [
                (self._key(key), ("input", types_of(value)) if (path, key) in inputs else self._fact(value))
                for key, value in container.items.items()
            ]
        for path, parts in self.parts.items():
            found[f"{path} parts"] = [(name, self._fact(value)) for name, value in parts.items()]
        for path, (_, values) in self.buffers_at_walk.items():
            found[f"values {path}"] = values.metadata if path in arrays else values
        storages = self.base._storages() if self.base is not None and self.tensors else {}
        for path, tensor in self.tensors.items():
            first_path, first = storages.setdefault(storage_of(tensor), (path, tensor))
            found[f"tensor {path}"] = (*metadata_of(tensor), first_path, self._position(first, tensor))
        return found

    def _storages(self) -> dict[int, tuple[str, torch.Tensor]]:
        """Returns the path of the first tensor on each storage, and the tensor, by the storage's id."""
        return dict(zip(reversed(storages_of(self.tensors.values())), reversed(self.tensors.items()), strict=True))

    def _fact(self, value: Any) -> Any:
        """Returns a hashable fact about a value: its fingerprint. Without a fingerprint: its class, and its items, path or identity."""
        if (found := fingerprint(value)) is not NO_FINGERPRINT:
            return found
        if issubclass(type(value), (tuple, frozenset)):  # isinstance reads __class__, which may warn
            items = tuple.__iter__(value) if issubclass(type(value), tuple) else frozenset.__iter__(value)
            path = None if type(value) in (tuple, frozenset, torch.Size) else self.path_of(value)
            return type(value), path, tuple(map(self._fact, items))
        path = self.path_of(value)
        return type(value), identity_of(value) if path is None or path in self.incomparable else path

    def _key(self, key: Any) -> Any:
        """Returns a hashable fact about a key of a container."""
        if (found := fingerprint(key)) is not NO_FINGERPRINT:
            return found if type(key) not in (str, int) else key
        if issubclass(type(key), (tuple, frozenset)):  # the path of such a key has the key's position, not its items
            return self._fact(key)
        return self.path_of(key) or identity_of(key)


def _distance(first: torch.Tensor, second: torch.Tensor) -> int:
    """Returns the distance of the first elements of two tensors in one storage, in bytes; 0 for tensors without strides."""
    return _offset(second) - _offset(first)


def _offset(tensor: torch.Tensor) -> int:
    """Returns the distance of a tensor's first element from the start of its storage, in bytes; 0 for a tensor without strides."""
    return tensor.storage_offset() * tensor.itemsize if tensor.layout == torch.strided else 0


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


def metadata_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Returns the metadata of a tensor on which a recording depends."""
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    flags = tensor.is_conj(), tensor.is_neg(), tensor.is_inference()
    return type(tensor), tensor.shape, strides, tensor.dtype, tensor.device, flags, tensor.requires_grad, tensor.is_leaf
