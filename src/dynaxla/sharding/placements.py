"""Generates the candidate placements of a model's parameters and a batch on a mesh."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from .mesh import Mesh
from .virtual_tensors import Dims

# The maximum number of consecutive matrices that are changed together: attention has this many.
_LONGEST_RUN = 4


@dataclass(frozen=True)
class Group:
    """Parameters with the same placement: those at the same position in modules of the same kind in repeated blocks.

    Attributes:
        role: Their common name, with "*" for the repeated part.
        names: The parameters' names.
        shape: Their shape.
        nbytes: The size of all of them.
        followers: Vectors of the same modules, such as biases, which are sharded like the first dimension.
    """

    role: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    nbytes: int
    followers: tuple[str, ...] = ()


class Placement(NamedTuple):
    """A placement of a batch and of all groups.

    Attributes:
        batch: The axes along which the batch's first dimension is sharded.
        dims: For each group, the axes along which each dimension is sharded.
    """

    batch: tuple[str, ...]
    dims: tuple[Dims, ...]


def groups_of(model: nn.Module) -> list[Group]:
    """Returns the groups of a model's parameters, in the model's order."""
    parameters = dict(model.named_parameters())
    found: dict[tuple[object, ...], list[str]] = {}
    followers: dict[str, list[str]] = {}
    for name, parameter in parameters.items():
        owner = name.rpartition(".")[0]
        weight = parameters.get(f"{owner}.weight" if owner else "weight")
        if parameter.dim() == 1 and weight is not None and weight.dim() > 1 and weight.shape[0] == parameter.shape[0]:
            followers.setdefault(f"{owner}.weight" if owner else "weight", []).append(name)
            continue
        key = _role(model, name), type(model.get_submodule(owner)), tuple(parameter.shape), parameter.dtype
        found.setdefault(key, []).append(name)
    return [
        Group(
            _shown(str(key[0])), tuple(names), tuple(parameters[names[0]].shape), sum(parameters[name].nbytes for name in names),
            tuple(follower for name in names for follower in followers.get(name, ())),
        )
        for key, names in found.items()
    ]  # fmt: skip


def _role(model: nn.Module, name: str) -> str:
    """Returns a parameter's name without the numbers of repeated modules."""
    module, found = model, []
    *path, last = name.split(".")
    for part in path:
        child = module.get_submodule(part)
        if not part.isdigit():
            found.append(part)
        elif next(child.children(), None) is not None:
            found.append("*")
        else:  # consecutive layers: square ones alternate between two roles
            alike = [other for other in module.children() if _shapes(other) == _shapes(child)]
            weight = getattr(child, "weight", None)
            is_square = isinstance(weight, torch.Tensor) and weight.dim() > 1 and weight.shape[0] == weight.shape[1]
            turn = next(index for index, other in enumerate(alike) if other is child) % 2
            found.append(f"*{turn}" if is_square else "*")
        module = child
    return ".".join([*found, last])


def _shown(role: str) -> str:
    return role.replace("*0.", "*(even).").replace("*1.", "*(odd).")


def _shapes(module: nn.Module) -> object:
    return type(module), [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]


class PlacementChoices:
    """The placements of groups on a mesh.

    Attributes:
        groups: The groups.
        axes: The axes with more than one device.
        tuples: The combinations of axes along which one dimension may be sharded.
    """

    def __init__(self, groups: Sequence[Group], mesh: Mesh, batch: int | None) -> None:
        """Prepares the choices. `batch`: the size of the batch's first dimension; None if there is no batch."""
        self.groups = groups
        self._sizes = {name: size for name, size in zip(mesh.names, mesh.sizes, strict=True) if size > 1}
        self.axes = tuple(self._sizes)
        self.tuples = [chosen for count in range(1, len(self.axes) + 1) for chosen in itertools.combinations(self.axes, count)]
        self._batch = batch
        self._blocks = self._runs()

    def _count(self, axes: Sequence[str]) -> int:
        return math.prod(self._sizes[axis] for axis in axes)

    def batches(self) -> list[tuple[str, ...]]:
        return [(), *(axes for axes in self.tuples if self._batch is not None and self._batch % self._count(axes) == 0)]

    def whole(self, batch: tuple[str, ...] = ()) -> Placement:
        return Placement(batch, tuple(((),) * len(group.shape) for group in self.groups))

    def _fits(self, group: Group, dims: Dims) -> bool:
        return all(size % self._count(axes) == 0 for size, axes in zip(group.shape, dims, strict=True))

    def along(self, group: Group, dim: int, axes: tuple[str, ...]) -> Dims | None:
        """Returns the sharding of one dimension along axes; None if the axes' size does not divide it."""
        dims = tuple(axes if index == dim else () for index in range(len(group.shape)))
        return dims if self._fits(group, dims) else None

    def of_group(self, index: int) -> Iterator[Dims]:
        """Yields a group's shardings: none; one dimension along axes; two dimensions along one axis each."""
        group = self.groups[index]
        count = len(group.shape)
        yield ((),) * count
        for axes in self.tuples:
            yield from (dims for dim in range(count) if (dims := self.along(group, dim, axes)) is not None)
        for first, second in itertools.permutations(self.axes, 2):
            for one, other in itertools.combinations(range(count), 2):
                dims = tuple((first,) if dim == one else (second,) if dim == other else () for dim in range(count))
                if self._fits(group, dims):
                    yield dims

    def sharded(self, placement: Placement, axes: tuple[str, ...]) -> Placement:
        """Also shards, as in FSDP, the first dimension of each parameter that is not sharded yet and that the axes' size divides."""
        found = []
        for group, dims in zip(self.groups, placement.dims, strict=True):
            free = [dim for dim, size in enumerate(group.shape) if not dims[dim] and size % self._count(axes) == 0]
            found.append(tuple(axes if free and dim == free[0] else given for dim, given in enumerate(dims)))
        return placement._replace(dims=tuple(found))

    def seeds(self) -> dict[str, Placement]:
        """Returns the placements from which a search starts, by a descriptive name."""
        found: dict[str, Placement] = {"all whole": self.whole()}
        for batch in self.batches():
            if batch:
                found[f"data parallel over {_listed(batch)}"] = self.whole(batch)
                found[f"fully sharded over {_listed(batch)}"] = self.sharded(self.whole(batch), batch)
            rest = tuple(axis for axis in self.axes if axis not in batch)
            for axes in [rest] if rest else []:
                pairs = self.in_pairs(self.whole(batch), axes)
                if pairs.dims != self.whole().dims:
                    found[f"pairs over {_listed(axes)}, batch over {_listed(batch)}"] = pairs
                    if batch:
                        found[f"pairs over {_listed(axes)}, sharded over {_listed(batch)}"] = self.sharded(pairs, batch)
        return found

    def in_pairs(self, placement: Placement, axes: tuple[str, ...]) -> Placement:
        """Shards the matrices of each module in a block by their first dimension, and the last of them by its second."""
        for run in self._blocks:
            if run.is_whole:
                placement = self._run(placement, run.members, axes, 0, 1) or placement
        return placement

    def moves(self, placement: Placement) -> Iterator[tuple[str, Placement]]:
        """Yields the neighbours of a placement with descriptive names. They differ in a run of matrices, the batch, or one group, largest
        first.
        """
        for run, axes, (first, last) in itertools.product(self._blocks, self.tuples, ((0, 1), (1, 0))):
            if (found := self._run(placement, run.members, axes, first, last)) is not None:
                names = ", ".join(self.groups[index].role for index in run.members)
                yield f"{names} in a row over {_listed(axes)}", found
        for batch in self.batches():
            yield f"batch over {_listed(batch)}", placement._replace(batch=batch)
        for index in sorted(range(len(self.groups)), key=lambda index: -self.groups[index].nbytes):
            for dims in self.of_group(index):
                yield f"{self.groups[index].role}: {shown_dims(dims)}", _with(placement, index, dims)

    def _run(self, placement: Placement, members: Sequence[int], axes: tuple[str, ...], first: int, last: int) -> Placement | None:
        for index in members:
            dims = self.along(self.groups[index], last if index == members[-1] else first, axes)
            if dims is None:
                return None
            placement = _with(placement, index, dims)
        return placement

    def _runs(self) -> list[_Run]:
        """Returns runs of consecutive matrices in a block; first those that are all the matrices of one module."""
        found: list[_Run] = []
        blocks: dict[str, list[int]] = {}
        for index, group in enumerate(self.groups):
            if len(group.shape) == 2:
                blocks.setdefault(group.role.rpartition("*")[0], []).append(index)
        for members in blocks.values():
            for length in range(2, _LONGEST_RUN + 1):
                for start in range(len(members) - length + 1):
                    run = tuple(members[start : start + length])
                    parents = {self._parent(index) for index in run}
                    beside = {self._parent(index) for index in {*members} - {*run}}
                    found.append(_Run(run, len(parents) == 1 and not parents & beside))
        return sorted(found, key=lambda run: (not run.is_whole, -sum(self.groups[index].nbytes for index in run.members)))

    def _parent(self, index: int) -> str:
        return ".".join(self.groups[index].role.split(".")[:-2])


class _Run(NamedTuple):
    """A run of consecutive matrices.

    Attributes:
        members: The groups' indices.
        is_whole: True if they are all the matrices of one module's children.
    """

    members: tuple[int, ...]
    is_whole: bool


def _with(placement: Placement, index: int, dims: Dims) -> Placement:
    return placement._replace(dims=(*placement.dims[:index], dims, *placement.dims[index + 1 :]))


def _listed(axes: Sequence[str]) -> str:
    return ", ".join(axes) or "none"


def shown_dims(dims: Dims) -> str:
    return f"({', '.join('+'.join(axes) or '-' for axes in dims)})" if any(dims) else "whole"
