"""One program on several devices: tensors on the device "jax" that are sharded over a mesh, with XLA's partitioner choosing the
communication.

mesh.py         `Mesh`: devices with named axes
marking.py      `mark_sharding`, `shard_module`: the mesh axes along which a tensor's dimensions are sharded
checkpoints.py  `checkpointable`: torch.distributed.checkpoint, shard by shard
planning.py     `plan`: a search for placements; placements.py generates candidates, virtual_tensors.py the inputs to compile them for
traffic.py      `report`: the data that programs move between devices, and the memory that they need; charts.py draws it
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
