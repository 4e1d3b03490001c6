"""`torch.distributed.checkpoint` (DCP) for tensors on the device "jax": it writes and reads one shard after the other.

DCP gets the shards of an object by three methods, such as `__create_chunk_list__`, which DTensor and `_ShardedTensor` implement. At the
beginning and the end of a load, DCP calls two methods of `Stateful` objects, which `_ValueView` implements. `Checkpointable` is a view of a
state dict: each value is replaced by a `_ValueView`, and each tensor in a value by a `_ShardedTensor`. A load keeps the loaded shards
separate from the tensors, on the shards' devices, until everything has been read.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import jax
import torch

from ..device import copies, storages
from ..device.strided_memory import StridedView
from ..errors import ArgumentError, UnsupportedTensor
from ..runtime import meshes, private
from ..runtime.layout import ORDINARY


def checkpointable(state_dict: MutableMapping[str, Any]) -> Checkpointable:
    """Returns a view of a state dict for `torch.distributed.checkpoint.save` and `load`. Pass it as their state dict, or as a value of it.

    `save` writes each tensor on the device "jax" that fills its storage shard by shard: each distinct shard once, and one at a time on the
    CPU. `load` reads the data that each device needs, whatever mesh or processes the shards were saved from. The tensors stay the same
    objects, with their aliases and shardings, and their version counters increase. Other values are saved and loaded as without the view.
    No tensor on the device is written to until everything has been read, so a load needs memory for a second copy of the loaded tensors.

    Args:
        state_dict: Values by name, nested as DCP allows. The keys in a checkpoint are the same as without the view.

    Raises:
        ArgumentError: `state_dict` is no dict.
        UnsupportedTensor: Raised later by DCP, if the view is nested inside a value of DCP's state dict, or if `async_save` gets it.
    """
    if not isinstance(state_dict, MutableMapping):
        raise ArgumentError(
            f"checkpointable takes a state dict, not a {type(state_dict).__name__}",
            hint="pass a dict, such as {'model': model.state_dict()}",
        )
    return Checkpointable(state_dict)


class Checkpointable(dict[str, Any]):
    """The view of a state dict that `checkpointable` returns.

    If the view is DCP's state dict, DCP calls `state_dict` and `load_state_dict` of the view's values (`_ValueView`). If the view is a
    value of DCP's state dict, DCP calls these methods of the view.
    """

    def __init__(self, state_dict: MutableMapping[str, Any]) -> None:
        self._state_dict, self._loading = state_dict, _LoadingShards()
        super().__init__({key: _ValueView(state_dict, key, self._loading) for key in state_dict})

    def state_dict(self) -> dict[str, Any]:
        return {key: _view(value, self._loading) for key, value in self._state_dict.items()}

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        self._loading.move_to_devices(is_finished=True)
        _commit(loaded)
        _store_other_values(self._state_dict, loaded)


class _ValueView:
    """The view of a value of a state dict.

    DCP calls `state_dict` before it saves or loads, and `load_state_dict` when everything has been loaded.
    """

    def __init__(self, state_dict: MutableMapping[str, Any], key: str, loading: _LoadingShards) -> None:
        self._state_dict, self._key, self._loading = state_dict, key, loading

    def state_dict(self) -> Any:
        return _view(self._state_dict[self._key], self._loading)

    def load_state_dict(self, loaded: Any) -> None:
        self._loading.move_to_devices(is_finished=True)
        _commit(loaded)
        _store_other_values(self._state_dict, {self._key: loaded})

    def __reduce__(self) -> Any:
        raise UnsupportedTensor(
            f"a checkpointable view ({self._key!r}) is nested too deeply: DCP would not report that all its values are read",
            hint="pass DCP the view itself or a dict of views: save({'model': checkpointable(state)}); or make the view of the whole dict",
        )


class _Shard(NamedTuple):
    """A distinct shard of a tensor, which several devices may have.

    Attributes:
        sizes: The shard's sizes, by the tensor's dimensions.
        arrays: The array on each device that has the shard, with dimensions in the tensor's memory order.
    """

    sizes: tuple[int, ...]
    arrays: dict[jax.Device, jax.Array]


class _LoadingShards:
    """The shards on the CPU that DCP's reader writes to. A shard that the reader has released moves to its device, to save memory."""

    def __init__(self) -> None:
        self._entries: list[tuple[_ShardedTensor, tuple[int, ...], torch.Tensor]] = []

    def cpu_tensor_for(self, leaf: _ShardedTensor, offsets: tuple[int, ...]) -> torch.Tensor:
        """Returns the CPU tensor into which the reader loads a shard, with dimensions in memory order.

        Args:
            leaf: The tensor that has the shard.
            offsets: The offsets of the shard's first element.
        """
        self.move_to_devices()
        for entry_leaf, entry_offsets, cpu_tensor in self._entries:
            if entry_leaf is leaf and entry_offsets == offsets:
                return cpu_tensor
        cpu_tensor = storages.to_cpu_tensor(leaf.device_and_array(offsets)[1], leaf.tensor.dtype)
        self._entries.append((leaf, offsets, cpu_tensor))
        return cpu_tensor

    def move_to_devices(self, is_finished: bool = False) -> None:
        """Moves shards to their devices: the shards that the reader has released, or all shards if the reader has finished."""
        remaining = []
        while self._entries:
            leaf, offsets, cpu_tensor = self._entries.pop()
            if not is_finished and private.storage_uses(cpu_tensor.untyped_storage()) > _RELEASED_USES:
                remaining.append((leaf, offsets, cpu_tensor))
            else:
                leaf.loaded_shards[offsets] = storages.array_from_cpu(cpu_tensor, leaf.device_and_array(offsets)[0])
        self._entries = remaining


# The use count of a storage that the reader has released: only the tensor in `_entries` and the storage's Python object refer to it.
_RELEASED_USES = 2


class _ShardedTensor(torch.Tensor):
    """An alias of a tensor that implements DCP's protocol for sharded objects.

    Attributes:
        tensor: The tensor.
        loading: The shards that are on the CPU during a load.
        is_loading: True while DCP loads the tensor, False while DCP saves it.
        loaded_shards: The loaded shards by the offsets of their first elements, each on the first of the devices that have the shard.
    """

    tensor: torch.Tensor
    loading: _LoadingShards
    is_loading: bool
    loaded_shards: dict[tuple[int, ...], jax.Array]

    @staticmethod
    def of(tensor: torch.Tensor, loading: _LoadingShards) -> _ShardedTensor:
        alias = tensor.detach().as_subclass(_ShardedTensor)
        alias.tensor, alias.loading, alias.is_loading, alias.loaded_shards = tensor, loading, False, {}
        return alias

    def __create_write_items__(self, fqn: str, _: object) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        self.is_loading = False
        properties = TensorProperties.create_from_tensor(self.tensor)
        return [
            WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, self.size()))
            for chunk in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        self.is_loading = True
        return self._chunks()

    def _chunks(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(shard.sizes)) for offsets, shard in _shards(self.tensor).items()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Returns a shard on the CPU: for `save` a copy, for `load` the tensor into which DCP loads the shard."""
        offsets = tuple(index.offset)
        cpu_tensor = (
            self.loading.cpu_tensor_for(self, offsets)
            if self.is_loading
            else storages.to_cpu_tensor(self.device_and_array(offsets)[1], self.tensor.dtype)
        )
        permutation = StridedView.of(self.tensor).layout.permutation
        return cpu_tensor.permute(sorted(range(len(permutation)), key=permutation.__getitem__))

    def device_and_array(self, offsets: tuple[int, ...]) -> tuple[jax.Device, jax.Array]:
        """Returns the first device that has a shard, and the shard's array: the loaded array, or else a part of the tensor's array."""
        device, array = next(iter(_shards(self.tensor)[offsets].arrays.items()))
        return device, self.loaded_shards.get(offsets, array)

    def data_ptr(self) -> int:
        raise UnsupportedTensor(
            f"a tensor {self.dtype}{list(self.shape)} on {self.device} has no address, and async_save copies whole tensors first",
            hint="use torch.distributed.checkpoint.save(checkpointable(state_dict), ...), which writes it part by part",
        )

    def loaded_array(self) -> jax.Array | None:
        """Returns the tensor's array with loaded shards in place of old ones, or None if no shard was loaded."""
        if not self.loaded_shards:
            return None
        arrays: dict[jax.Device, jax.Array] = {}
        for offsets, shard in _shards(self.tensor).items():
            first, new = self.device_and_array(offsets)
            for device in shard.arrays:  # arrays must not alias: a program that writes to one in place would change the other
                is_loaded = device == first and offsets in self.loaded_shards
                arrays[device] = new if is_loaded else jax.device_put(new, device, may_alias=False)
        packed = copies.packed_array(self.tensor)
        if meshes.sharding_of(packed) is None:
            return next(iter(arrays.values()))
        shards = [arrays[shard.device] for shard in packed.addressable_shards]
        return jax.make_array_from_single_device_arrays(packed.shape, packed.sharding, shards)


def _shards(tensor: torch.Tensor) -> dict[tuple[int, ...], _Shard]:
    """Returns the distinct shards of a tensor that fills its storage, by the offsets of their first elements."""
    array = copies.packed_array(tensor)
    permutation = StridedView.of(tensor).layout.permutation
    shards: dict[tuple[int, ...], _Shard] = {}
    for array_shard in array.addressable_shards:
        offsets, sizes = [0] * tensor.dim(), [0] * tensor.dim()
        for axis, dim in enumerate(permutation):
            offsets[dim], sizes[dim] = array_shard.index[axis].start or 0, array_shard.data.shape[axis]
        distinct_shard = shards.setdefault(tuple(offsets), _Shard(tuple(sizes), {}))
        distinct_shard.arrays[array_shard.device] = array_shard.data
    return shards


def _view(value: Any, loading: _LoadingShards) -> Any:
    """Returns a copy of a value of a state dict, with a `_ShardedTensor` in place of each supported tensor in dicts and lists.

    Other containers, into which DCP does not look, are not copied.
    """
    if isinstance(value, Mapping):
        return {key: _view(item, loading) for key, item in value.items()}
    if isinstance(value, list):
        return [_view(item, loading) for item in value]
    return _ShardedTensor.of(value, loading) if _is_supported(value) else value


def _is_supported(value: Any) -> bool:
    """True for a tensor on the device that fills its storage. DCP treats other values as usual."""
    if type(value) not in ORDINARY or not storages.is_jax_tensor(value) or not value.numel():
        return False
    return not (value.is_conj() or value.is_neg()) and StridedView.of(value).fills(value.untyped_storage().nbytes())


def _leaves(loaded: Any) -> list[_ShardedTensor]:
    if isinstance(loaded, Mapping):
        loaded = list(loaded.values())
    if isinstance(loaded, list):
        return [leaf for item in loaded for leaf in _leaves(item)]
    return [loaded] if isinstance(loaded, _ShardedTensor) else []


def _commit(loaded: Any) -> None:
    """Writes the loaded data into the tensors."""
    ready = [(leaf, array) for leaf in _leaves(loaded) if (array := leaf.loaded_array()) is not None]
    for leaf, array in ready:
        tensor, storage = leaf.tensor, leaf.tensor.untyped_storage()
        while True:
            before = copies.packed_array(tensor)
            after = array if before.sharding == array.sharding else meshes.copy_to(array, before.sharding)
            if storages.compare_and_swap([(storage, before, after)]):
                break
        torch.autograd.graph.increment_version(tensor)
        leaf.loaded_shards = {}


def _store_other_values(target: Any, loaded: Any) -> None:
    """Stores loaded values other than `_ShardedTensor`s in a state dict, or in a container of the state dict, as DCP does without a view.

    A list that is too short is extended.
    """
    items = loaded.items() if isinstance(loaded, Mapping) else enumerate(loaded)
    for key, value in items:
        if isinstance(value, _ShardedTensor):
            continue
        exists = key in target if isinstance(target, Mapping) else key < len(target)
        if isinstance(value, (Mapping, list)) and exists and isinstance(target[key], (Mapping, list)):
            _store_other_values(target[key], value)
        elif exists or isinstance(target, Mapping):
            target[key] = value
        else:
            target.append(value)
