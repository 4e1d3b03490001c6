"""`torch.distributed.checkpoint` (DCP) for tensors on the device "jax": each shard is written and read by itself.

DCP's planners ask an object for its shards through a protocol of three methods, which DTensor implements, too; and at both ends of a load
DCP calls `Stateful` objects. A view of a state dict has such objects in place of its tensors. Loaded shards are kept apart from the
tensors, on their devices, until everything has been read.
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
    """Returns a view of a state dict for `torch.distributed.checkpoint.save` and `load`: as their state dict, or as one of its values.

    `save` writes the shards of each tensor on the device "jax" that fills its storage, each shard once, and has at most one shard on the
    CPU at a time. `load` reads the data that each device needs, whatever mesh or processes the shards were saved from. The tensors stay the
    same objects, with their aliases and shardings, and their version counters increase; values that are no tensors are put into
    `state_dict`. Nothing on the device is written to until everything has been read, so a load needs memory for a second copy of the loaded
    tensors.

    Args:
        state_dict: Values by name, nested as DCP allows. The keys in a checkpoint are the same as without the view.

    Raises:
        ArgumentError: `state_dict` is no dict.
        UnsupportedTensor: When the view is given to DCP as a part of a value, or to `async_save`.
    """
    if not isinstance(state_dict, MutableMapping):
        raise ArgumentError(
            f"checkpointable takes a state dict, not a {type(state_dict).__name__}",
            hint="pass a dict, such as {'model': model.state_dict()}",
        )
    return Checkpointable(state_dict)


class Checkpointable(dict[str, Any]):
    """See `checkpointable`. DCP calls `state_dict` of the values if this is the whole state dict, and of this object if it is one of the
    values.
    """

    def __init__(self, state_dict: MutableMapping[str, Any]) -> None:
        self._state_dict, self._arriving = state_dict, _Arriving()
        super().__init__({key: _Value(state_dict, key, self._arriving) for key in state_dict})

    def state_dict(self) -> dict[str, Any]:
        return {key: _viewed(value, self._arriving) for key, value in self._state_dict.items()}

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        self._arriving.move_on(is_over=True)
        _commit(loaded)
        _take_back(self._state_dict, loaded)


class _Value:
    """A value of a state dict. DCP calls `state_dict` before it saves or loads, and `load_state_dict` when everything has been loaded."""

    def __init__(self, state_dict: MutableMapping[str, Any], key: str, arriving: _Arriving) -> None:
        self._state_dict, self._key, self._arriving = state_dict, key, arriving

    def state_dict(self) -> Any:
        return _viewed(self._state_dict[self._key], self._arriving)

    def load_state_dict(self, loaded: Any) -> None:
        self._arriving.move_on(is_over=True)
        _commit(loaded)
        _take_back(self._state_dict, {self._key: loaded})

    def __reduce__(self) -> Any:
        raise UnsupportedTensor(
            f"a checkpointable view ({self._key!r}) is nested too deeply: DCP would not report that all its values are read",
            hint="pass DCP the view itself or a dict of views: save({'model': checkpointable(state)}); or make the view of the whole dict",
        )


class _Shard(NamedTuple):
    """A distinct shard of a tensor.

    Attributes:
        sizes: Its sizes.
        arrays: The array on each device that has the shard, with dimensions in the tensor's memory order.
    """

    sizes: tuple[int, ...]
    arrays: dict[jax.Device, jax.Array]


class _Arriving:
    """Shards that are being loaded, on the CPU. A shard that the reader has released is moved to its device, so that few are on the CPU."""

    def __init__(self) -> None:
        self._parts: list[tuple[_Leaf, tuple[int, ...], torch.Tensor]] = []

    def of(self, leaf: _Leaf, offsets: tuple[int, ...]) -> torch.Tensor:
        """Returns the shard of a tensor that starts at these offsets, as a CPU tensor to be written to, with dimensions in memory order."""
        self.move_on()
        for known, place, host in self._parts:
            if known is leaf and place == offsets:
                return host
        host = storages.to_cpu_tensor(leaf.now(offsets)[1], leaf.tensor.dtype)
        self._parts.append((leaf, offsets, host))
        return host

    def move_on(self, is_over: bool = False) -> None:
        """Moves the shards that the reader has released to their devices. `is_over`: the reader has finished, so all of them."""
        kept = []
        while self._parts:
            leaf, offsets, host = self._parts.pop()
            if not is_over and private.storage_uses(host.untyped_storage()) > _UNUSED:
                kept.append((leaf, offsets, host))
            else:
                leaf.read[offsets] = storages.array_from_cpu(host, leaf.now(offsets)[0])
        self._parts = kept


# The use count of a storage that only one tensor and the storage's Python object refer to.
_UNUSED = 2


class _Leaf(torch.Tensor):
    """An alias of a tensor that implements DCP's protocol for sharded objects."""

    tensor: torch.Tensor
    arriving: _Arriving
    is_loading: bool
    # The loaded shards, by the offsets of their first element, each on the first of the devices that have the shard.
    read: dict[tuple[int, ...], jax.Array]

    @staticmethod
    def of(tensor: torch.Tensor, arriving: _Arriving) -> _Leaf:
        found = tensor.detach().as_subclass(_Leaf)
        found.tensor, found.arriving, found.is_loading, found.read = tensor, arriving, False, {}
        return found

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

        return [ChunkStorageMetadata(torch.Size(offsets), torch.Size(part.sizes)) for offsets, part in _parts(self.tensor).items()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        """Returns a shard on the CPU: for `save` a copy, for `load` the tensor to be written to."""
        offsets = tuple(index.offset)
        host = self.arriving.of(self, offsets) if self.is_loading else storages.to_cpu_tensor(self.now(offsets)[1], self.tensor.dtype)
        permutation = StridedView.of(self.tensor).layout.permutation
        return host.permute(sorted(range(len(permutation)), key=permutation.__getitem__))

    def now(self, offsets: tuple[int, ...]) -> tuple[jax.Device, jax.Array]:
        """Returns a shard's first device, and the shard's array: the loaded one, or else the present one."""
        device, array = next(iter(_parts(self.tensor)[offsets].arrays.items()))
        return device, self.read.get(offsets, array)

    def data_ptr(self) -> int:
        raise UnsupportedTensor(
            f"a tensor {self.dtype}{list(self.shape)} on {self.device} has no address, and async_save copies whole tensors first",
            hint="use torch.distributed.checkpoint.save(checkpointable(state_dict), ...), which writes it part by part",
        )

    def arrived(self) -> jax.Array | None:
        """Returns the tensor's array with the loaded shards; None if none was loaded."""
        if not self.read:
            return None
        found: dict[jax.Device, jax.Array] = {}
        for offsets, part in _parts(self.tensor).items():
            first, new = self.now(offsets)
            for device in part.arrays:  # no array may alias another, or a program that writes to one in place would change the other
                is_ours = device == first and offsets in self.read
                found[device] = new if is_ours else jax.device_put(new, device, may_alias=False)
        whole = copies.packed_array(self.tensor)
        if meshes.sharding_of(whole) is None:
            return next(iter(found.values()))
        shards = [found[shard.device] for shard in whole.addressable_shards]
        return jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, shards)


def _parts(tensor: torch.Tensor) -> dict[tuple[int, ...], _Shard]:
    """Returns the distinct shards of a tensor that fills its storage, by the offsets of their first elements."""
    array = copies.packed_array(tensor)
    permutation = StridedView.of(tensor).layout.permutation
    found: dict[tuple[int, ...], _Shard] = {}
    for shard in array.addressable_shards:
        offsets, sizes = [0] * tensor.dim(), [0] * tensor.dim()
        for axis, dim in enumerate(permutation):
            offsets[dim], sizes[dim] = shard.index[axis].start or 0, shard.data.shape[axis]
        part = found.setdefault(tuple(offsets), _Shard(tuple(sizes), {}))
        part.arrays[shard.device] = shard.data
    return found


def _viewed(value: Any, arriving: _Arriving) -> Any:
    """Returns a value of a state dict with leaves in place of tensors. Containers are copied, except those that DCP does not look into."""
    if isinstance(value, Mapping):
        return {key: _viewed(item, arriving) for key, item in value.items()}
    if isinstance(value, list):
        return [_viewed(item, arriving) for item in value]
    return _Leaf.of(value, arriving) if _has_parts(value) else value


def _has_parts(value: Any) -> bool:
    """True for a tensor on the device that fills its storage. DCP treats other values as it always does."""
    if type(value) not in ORDINARY or not storages.is_jax_tensor(value) or not value.numel():
        return False
    return not (value.is_conj() or value.is_neg()) and StridedView.of(value).fills(value.untyped_storage().nbytes())


def _leaves(loaded: Any) -> list[_Leaf]:
    if isinstance(loaded, Mapping):
        loaded = list(loaded.values())
    if isinstance(loaded, list):
        return [leaf for item in loaded for leaf in _leaves(item)]
    return [loaded] if isinstance(loaded, _Leaf) else []


def _commit(loaded: Any) -> None:
    """Gives the tensors the data that was loaded for them."""
    ready = [(leaf, array) for leaf in _leaves(loaded) if (array := leaf.arrived()) is not None]
    for leaf, array in ready:
        tensor, storage = leaf.tensor, leaf.tensor.untyped_storage()
        while True:
            before = copies.packed_array(tensor)
            after = array if before.sharding == array.sharding else meshes.moved(array, before.sharding)
            if storages.compare_and_swap([(storage, before, after)]):
                break
        torch.autograd.graph.increment_version(tensor)
        leaf.read = {}


def _take_back(mine: Any, loaded: Any) -> None:
    """Puts loaded values other than such tensors where DCP puts them without a view: into the state dict and its containers."""
    items = loaded.items() if isinstance(loaded, Mapping) else enumerate(loaded)
    for key, value in items:
        if isinstance(value, _Leaf):
            continue
        is_known = key in mine if isinstance(mine, Mapping) else key < len(mine)
        if isinstance(value, (Mapping, list)) and is_known and isinstance(mine[key], (Mapping, list)):
            _take_back(mine[key], value)
        elif is_known or isinstance(mine, Mapping):
            mine[key] = value
        else:
            mine.append(value)
