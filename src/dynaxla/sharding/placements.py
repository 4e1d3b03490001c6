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

# The largest number of consecutive matrices whose shardings are changed together. Attention has four: query, key, value and output.
_MAX_RUN_LENGTH = 4


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that get the same sharding: for example, the first linear weight of the MLP in each block of a transformer.

    They have the same name apart from the block's number, the same shape and dtype, and belong to modules of the same class.

    Attributes:
        role: The parameters' common name, with "*" for the number of the block, e.g. "layers.*.mlp.up.weight".
        names: The parameters' names.
        shape: The shape of each parameter.
        nbytes: The size of all these parameters together, in bytes.
        followers: The names of vectors in the same modules, such as biases. They are sharded like the parameters' first dimension.
    """

    role: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    nbytes: int
    followers: tuple[str, ...] = ()


class Placement(NamedTuple):
    """A sharding of a batch and of all groups of parameters.

    Attributes:
        batch: The mesh axes along which the batch's first dimension is sharded.
        dims: For each group, the mesh axes along which each dimension is sharded.
    """

    batch: tuple[str, ...]
    dims: tuple[Dims, ...]


def groups_of(model: nn.Module) -> list[ParameterGroup]:
    """Returns the groups of a model's parameters, in the model's order."""
    parameters = dict(model.named_parameters())
    groups: dict[tuple[object, ...], list[str]] = {}
    followers: dict[str, list[str]] = {}
    for name, parameter in parameters.items():
        owner = name.rpartition(".")[0]
        weight = parameters.get(f"{owner}.weight" if owner else "weight")
        if parameter.dim() == 1 and weight is not None and weight.dim() > 1 and weight.shape[0] == parameter.shape[0]:
            followers.setdefault(f"{owner}.weight" if owner else "weight", []).append(name)
            continue
        key = _role(model, name), type(model.get_submodule(owner)), tuple(parameter.shape), parameter.dtype
        groups.setdefault(key, []).append(name)
    return [
        ParameterGroup(
            _readable_role(str(key[0])), tuple(names), tuple(parameters[names[0]].shape), sum(parameters[name].nbytes for name in names),
            tuple(follower for name in names for follower in followers.get(name, ())),
        )
        for key, names in groups.items()
    ]  # fmt: skip


def _role(model: nn.Module, name: str) -> str:
    """Returns a parameter's name with "*" in place of the numbers of repeated modules."""
    module, parts = model, []
    *path, last = name.split(".")
    for name_part in path:
        child = module.get_submodule(name_part)
        if not name_part.isdigit():
            parts.append(name_part)
        elif next(child.children(), None) is not None:
            parts.append("*")
        else:  # a layer, as in nn.Sequential: square layers get two roles in alternation, so that they can be sharded in pairs
            same_shapes = [other for other in module.children() if _shapes(other) == _shapes(child)]
            weight = getattr(child, "weight", None)
            is_square = isinstance(weight, torch.Tensor) and weight.dim() > 1 and weight.shape[0] == weight.shape[1]
            parity = next(index for index, other in enumerate(same_shapes) if other is child) % 2
            parts.append(f"*{parity}" if is_square else "*")
        module = child
    return ".".join([*parts, last])


def _readable_role(role: str) -> str:
    return role.replace("*0.", "*(even).").replace("*1.", "*(odd).")


def _shapes(module: nn.Module) -> object:
    return type(module), [(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()]


class PlacementChoices:
    """The possible placements of groups of parameters and a batch on a mesh.

    Args:
        groups: The groups.
        mesh: The mesh.
        batch: The size of the batch's first dimension; None if there is no batch.

    Attributes:
        groups: The groups.
        axes: The names of the mesh axes with more than one device.
        axis_combinations: The combinations of axes along which one dimension may be sharded.
    """

    def __init__(self, groups: Sequence[ParameterGroup], mesh: Mesh, batch: int | None) -> None:
        self.groups = groups
        self._sizes = {name: size for name, size in zip(mesh.names, mesh.sizes, strict=True) if size > 1}
        self.axes = tuple(self._sizes)
        self.axis_combinations = [chosen for count in range(1, len(self.axes) + 1) for chosen in itertools.combinations(self.axes, count)]
        self._batch = batch
        self._runs = self._find_runs()

    def _num_devices(self, axes: Sequence[str]) -> int:
        return math.prod(self._sizes[axis] for axis in axes)

    def batch_shardings(self) -> list[tuple[str, ...]]:
        """Returns the combinations of axes along which the batch may be sharded. The first is (): no axis."""
        return [(), *(axes for axes in self.axis_combinations if self._batch is not None and self._batch % self._num_devices(axes) == 0)]

    def replicated(self, batch: tuple[str, ...] = ()) -> Placement:
        """Returns the placement in which no parameter is sharded, and the batch is sharded along the axes `batch`."""
        return Placement(batch, tuple(((),) * len(group.shape) for group in self.groups))

    def _is_divisible(self, group: ParameterGroup, dims: Dims) -> bool:
        """True if, for each dimension of a group, the number of devices along its axes divides the dimension's size."""
        return all(size % self._num_devices(axes) == 0 for size, axes in zip(group.shape, dims, strict=True))

    def shard_dim(self, group: ParameterGroup, dim: int, axes: tuple[str, ...]) -> Dims | None:
        """Returns the sharding of one dimension along axes, or None if the number of devices does not divide the dimension's size."""
        dims = tuple(axes if index == dim else () for index in range(len(group.shape)))
        return dims if self._is_divisible(group, dims) else None

    def group_shardings(self, index: int) -> Iterator[Dims]:
        """Yields the shardings of a group: no dimension, one dimension along one or more axes, two dimensions along one axis each."""
        group = self.groups[index]
        count = len(group.shape)
        yield ((),) * count
        for axes in self.axis_combinations:
            yield from (dims for dim in range(count) if (dims := self.shard_dim(group, dim, axes)) is not None)
        for first, second in itertools.permutations(self.axes, 2):
            for first_dim, second_dim in itertools.combinations(range(count), 2):
                dims = tuple((first,) if dim == first_dim else (second,) if dim == second_dim else () for dim in range(count))
                if self._is_divisible(group, dims):
                    yield dims

    def fully_sharded(self, placement: Placement, axes: tuple[str, ...]) -> Placement:
        """Shards parameters along further axes, as in FSDP.

        In each parameter, the axes shard the first dimension that is not sharded yet and whose size their number of devices divides.
        """
        all_dims = []
        for group, dims in zip(self.groups, placement.dims, strict=True):
            free = [dim for dim, size in enumerate(group.shape) if not dims[dim] and size % self._num_devices(axes) == 0]
            all_dims.append(tuple(axes if free and dim == free[0] else dim_axes for dim, dim_axes in enumerate(dims)))
        return placement._replace(dims=tuple(all_dims))

    def starting_points(self) -> dict[str, Placement]:
        """Returns the placements with which a search starts, by descriptive name."""
        placements: dict[str, Placement] = {"all whole": self.replicated()}
        for batch in self.batch_shardings():
            if batch:
                placements[f"data parallel over {_join_axes(batch)}"] = self.replicated(batch)
                placements[f"fully sharded over {_join_axes(batch)}"] = self.fully_sharded(self.replicated(batch), batch)
            rest = tuple(axis for axis in self.axes if axis not in batch)
            for axes in [rest] if rest else []:
                pairs = self.shard_pairs(self.replicated(batch), axes)
                if pairs.dims != self.replicated().dims:
                    placements[f"pairs over {_join_axes(axes)}, batch over {_join_axes(batch)}"] = pairs
                    if batch:
                        placements[f"pairs over {_join_axes(axes)}, sharded over {_join_axes(batch)}"] = self.fully_sharded(pairs, batch)
        return placements

    def shard_pairs(self, placement: Placement, axes: tuple[str, ...]) -> Placement:
        """Shards the matrices of each module, such as an attention or an MLP, along axes as in tensor parallelism.

        The last matrix of a module is sharded along dimension 1 (its inputs), the others along dimension 0 (their outputs). So the values
        between the matrices are sharded, too, and only the last result needs an all-reduce.
        """
        for run in self._runs:
            if run.is_whole_module:
                placement = self._shard_run(placement, run.group_indices, axes, 0, 1) or placement
        return placement

    def neighbors(self, placement: Placement) -> Iterator[tuple[str, Placement]]:
        """Yields the placements that differ from a placement in one change, with descriptions of the changes.

        First come changes of a run of matrices, then of the batch, then of one group, the largest groups first.
        """
        for run, axes, (first, last) in itertools.product(self._runs, self.axis_combinations, ((0, 1), (1, 0))):
            if (neighbor := self._shard_run(placement, run.group_indices, axes, first, last)) is not None:
                names = ", ".join(self.groups[index].role for index in run.group_indices)
                yield f"{names} in a row over {_join_axes(axes)}", neighbor
        for batch in self.batch_shardings():
            yield f"batch over {_join_axes(batch)}", placement._replace(batch=batch)
        for index in sorted(range(len(self.groups)), key=lambda index: -self.groups[index].nbytes):
            for dims in self.group_shardings(index):
                yield f"{self.groups[index].role}: {format_dims(dims)}", _replace_dims(placement, index, dims)

    def _shard_run(
        self, placement: Placement, group_indices: Sequence[int], axes: tuple[str, ...], first: int, last: int
    ) -> Placement | None:
        """Shards a run of matrices along axes: dimension `last` of the last matrix, dimension `first` of all other matrices.

        Returns None if the number of devices does not divide a dimension's size.
        """
        for index in group_indices:
            dims = self.shard_dim(self.groups[index], last if index == group_indices[-1] else first, axes)
            if dims is None:
                return None
            placement = _replace_dims(placement, index, dims)
        return placement

    def _find_runs(self) -> list[_MatrixRun]:
        """Returns the runs of consecutive matrices in each block: first those with `is_whole_module`, and large runs before small ones."""
        runs: list[_MatrixRun] = []
        blocks: dict[str, list[int]] = {}
        for index, group in enumerate(self.groups):
            if len(group.shape) == 2:
                blocks.setdefault(group.role.rpartition("*")[0], []).append(index)
        for block in blocks.values():
            for length in range(2, _MAX_RUN_LENGTH + 1):
                for start in range(len(block) - length + 1):
                    run = tuple(block[start : start + length])
                    parents = {self._parent(index) for index in run}
                    other_parents = {self._parent(index) for index in {*block} - {*run}}
                    runs.append(_MatrixRun(run, len(parents) == 1 and not parents & other_parents))
        return sorted(runs, key=lambda run: (not run.is_whole_module, -sum(self.groups[index].nbytes for index in run.group_indices)))

    def _parent(self, index: int) -> str:
        """Returns the name of the module that has a group's modules as children: "layers.*.mlp" for "layers.*.mlp.up.weight"."""
        return ".".join(self.groups[index].role.split(".")[:-2])


class _MatrixRun(NamedTuple):
    """A run of consecutive matrices in a block.

    Attributes:
        group_indices: The indices of the matrices' groups.
        is_whole_module: True if the run has all matrices of the direct children of one module, such as an attention.
    """

    group_indices: tuple[int, ...]
    is_whole_module: bool


def _replace_dims(placement: Placement, index: int, dims: Dims) -> Placement:
    return placement._replace(dims=(*placement.dims[:index], dims, *placement.dims[index + 1 :]))


def _join_axes(axes: Sequence[str]) -> str:
    return ", ".join(axes) or "none"


def format_dims(dims: Dims) -> str:
    return f"({', '.join('+'.join(axes) or '-' for axes in dims)})" if any(dims) else "whole"
