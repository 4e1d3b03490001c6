"""`torch.distributed.checkpoint` (DCP) and tensors of the device "jax": each part of a sharded tensor is written, and read, by itself.

DCP's planners ask an object for its parts by a protocol of three methods, which DTensor has too; and at both ends of a load DCP asks what
is `Stateful`. A view of a state dict has such objects in its tensors' places. What is read lies beside the tensors, on the devices that it
is for, until all has been read.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import jax
import torch

from ..device import copies, storages
from ..device.memory import Place
from ..errors import ArgumentError, UnsupportedTensor
from ..runtime import meshes, private
from ..runtime.layout import ORDINARY


def checkpointable(state_dict: MutableMapping[str, Any]) -> Checkpointable:
    """A view of a state dict for `torch.distributed.checkpoint.save` and `load`: as their state dict, or as one of its values.

    state_dict: names to values, nested as DCP allows; its keys in a checkpoint are those that it has without the view. Of each tensor on
    the device "jax" that fills its storage, `save` writes the parts on the devices, each once, and never has more than one on the CPU.
    `load` reads what each device needs, whatever mesh or processes the parts were saved from. The tensors stay the same objects, with
    their aliases and shardings, and their versions count on; what is no tensor is put into `state_dict`. Until all is read, nothing on the
    device is written to: so a load needs the memory for what it loads once more.

    Raises: ArgumentError for what is no dict; UnsupportedTensor where the view is given to DCP as a part of a value, or to `async_save`.
    """
    if not isinstance(state_dict, MutableMapping):
        raise ArgumentError(
            f"checkpointable takes a state dict, not a {type(state_dict).__name__}", hint="as in {'model': model.state_dict()}"
        )
    return Checkpointable(state_dict)


class Checkpointable(dict[str, Any]):
    """See `checkpointable`. DCP asks the values for what they hold if this is the state dict, and this itself if it is a value of it."""

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
    """One of a state dict's values, which DCP asks for what it holds before it saves or loads, and tells when all has been loaded."""

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
            f"a checkpointable view ({self._key!r}) lies too deep in what is to be saved or loaded: nobody would tell it that all is read",
            hint="give DCP the view itself, or as a value: save({'model': checkpointable(state)}); or make the view of the whole dict",
        )


class _Part(NamedTuple):
    """A part of a tensor: its sizes, and by device that has it an array, in the order in which the tensor lies in memory."""

    sizes: tuple[int, ...]
    arrays: dict[jax.Device, jax.Array]


class _Arriving:
    """Parts that are being read, on the CPU. Those that the reader has let go of go to their devices, so that there are few."""

    def __init__(self) -> None:
        self._parts: list[tuple[_Leaf, tuple[int, ...], torch.Tensor]] = []

    def of(self, leaf: _Leaf, offsets: tuple[int, ...]) -> torch.Tensor:
        """The part of a tensor that begins there, in the order in which the tensor lies in memory: to be written to."""
        self.move_on()
        for known, place, host in self._parts:
            if known is leaf and place == offsets:
                return host
        host = storages.on_host(leaf.now(offsets)[1], leaf.tensor.dtype)
        self._parts.append((leaf, offsets, host))
        return host

    def move_on(self, is_over: bool = False) -> None:
        """is_over: whether nobody reads any more."""
        kept = []
        while self._parts:
            leaf, offsets, host = self._parts.pop()
            if not is_over and private.storage_uses(host.untyped_storage()) > _UNUSED:
                kept.append((leaf, offsets, host))
            else:
                leaf.read[offsets] = storages.as_array(host, leaf.now(offsets)[0])
        self._parts = kept


# The uses of a storage that one tensor and the storage's Python object have.
_UNUSED = 2


class _Leaf(torch.Tensor):
    """An alias of a tensor, with DCP's protocol for what has parts."""

    tensor: torch.Tensor
    arriving: _Arriving
    is_loading: bool
    # What has been read, by the place of a part's first element: on the first of the devices that have the part.
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
        """A part on the CPU: for `save` a copy, for `load` what is to be written to."""
        offsets = tuple(index.offset)
        host = self.arriving.of(self, offsets) if self.is_loading else storages.on_host(self.now(offsets)[1], self.tensor.dtype)
        permutation = Place.of(self.tensor).layout.permutation
        return host.permute(sorted(range(len(permutation)), key=permutation.__getitem__))

    def now(self, offsets: tuple[int, ...]) -> tuple[jax.Device, jax.Array]:
        """A part as it has been read, or else as it is; and the device where it lies."""
        device, array = next(iter(_parts(self.tensor)[offsets].arrays.items()))
        return device, self.read.get(offsets, array)

    def data_ptr(self) -> int:
        raise UnsupportedTensor(
            f"a tensor {self.dtype}{list(self.shape)} on {self.device} has no address: async_save copies whole tensors to the CPU first",
            hint="torch.distributed.checkpoint.save(checkpointable(state_dict), ...) writes it part by part",
        )

    def arrived(self) -> jax.Array | None:
        """The tensor's array with what has been read; None if nothing has."""
        if not self.read:
            return None
        found: dict[jax.Device, jax.Array] = {}
        for offsets, part in _parts(self.tensor).items():
            first, new = self.now(offsets)
            for device in part.arrays:  # what is read is ours; else a program that writes to one array would write to another, too
                is_ours = device == first and offsets in self.read
                found[device] = new if is_ours else jax.device_put(new, device, may_alias=False)
        whole = copies.packed_array(self.tensor)
        if meshes.sharding_of(whole) is None:
            return next(iter(found.values()))
        shards = [found[shard.device] for shard in whole.addressable_shards]
        return jax.make_array_from_single_device_arrays(whole.shape, whole.sharding, shards)


def _parts(tensor: torch.Tensor) -> dict[tuple[int, ...], _Part]:
    """The different parts of a tensor that fills its storage, by the place of their first elements."""
    array = copies.packed_array(tensor)
    permutation = Place.of(tensor).layout.permutation
    found: dict[tuple[int, ...], _Part] = {}
    for shard in array.addressable_shards:
        offsets, sizes = [0] * tensor.dim(), [0] * tensor.dim()
        for axis, dim in enumerate(permutation):
            offsets[dim], sizes[dim] = shard.index[axis].start or 0, shard.data.shape[axis]
        part = found.setdefault(tuple(offsets), _Part(tuple(sizes), {}))
        part.arrays[shard.device] = shard.data
    return found


def _viewed(value: Any, arriving: _Arriving) -> Any:
    """A value of a state dict, with leaves in the places of tensors. Containers are copied, but for those that DCP does not look into."""
    if isinstance(value, Mapping):
        return {key: _viewed(item, arriving) for key, item in value.items()}
    if isinstance(value, list):
        return [_viewed(item, arriving) for item in value]
    return _Leaf.of(value, arriving) if _has_parts(value) else value


def _has_parts(value: Any) -> bool:
    """Whether it is a tensor of the device that is alone in its storage. Others DCP treats as it treats any tensor."""
    if type(value) not in ORDINARY or not storages.is_ours(value) or not value.numel():
        return False
    return not (value.is_conj() or value.is_neg()) and Place.of(value).fills(value.untyped_storage().nbytes())


def _leaves(loaded: Any) -> list[_Leaf]:
    if isinstance(loaded, Mapping):
        loaded = list(loaded.values())
    if isinstance(loaded, list):
        return [leaf for item in loaded for leaf in _leaves(item)]
    return [loaded] if isinstance(loaded, _Leaf) else []


def _commit(loaded: Any) -> None:
    """Let tensors have what has been read for them."""
    ready = [(leaf, array) for leaf in _leaves(loaded) if (array := leaf.arrived()) is not None]
    for leaf, array in ready:
        tensor, storage = leaf.tensor, leaf.tensor.untyped_storage()
        while True:
            before = copies.packed_array(tensor)
            after = array if before.sharding == array.sharding else meshes.moved(array, before.sharding)
            if storages.replace_arrays([(storage, before, after)]):
                break
        torch.autograd.graph.increment_version(tensor)
        leaf.read = {}


def _take_back(mine: Any, loaded: Any) -> None:
    """Put what is no tensor of ours where DCP puts it without a view: into the state dict and its containers."""
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
