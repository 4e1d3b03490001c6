"""Tensors on the device "jax" that are sharded over a mesh of devices. XLA's partitioner chooses the communication.

mesh.py             `Mesh`: devices with named axes
marking.py          `mark_sharding`, `shard_module`: the mesh axes along which a tensor's dimensions are sharded
checkpoints.py      `checkpointable`: torch.distributed.checkpoint, shard by shard
planning.py         `plan`: a search for placements of parameters and batch
placements.py       the placements that `plan` tries
virtual_tensors.py  inputs without data, for which these placements are compiled
traffic.py          `report`: the data that programs move between devices, and the memory that they need
charts.py           draws reports
text_tables.py      tables as text
"""

from .checkpoints import checkpointable as checkpointable
from .marking import local_shards as local_shards
from .marking import mark_sharding as mark_sharding
from .marking import shard_module as shard_module
from .marking import sharding_of as sharding_of
from .mesh import Mesh as Mesh
from .planning import Costs as Costs
from .planning import Plan as Plan
from .planning import plan as plan
from .traffic import report as report
