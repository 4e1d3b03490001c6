"""One program on several devices: tensors on the device "jax" whose arrays lie on a mesh, where XLA's partitioner decides what moves.

mesh.py         devices with axes
marking.py      which dimension of a tensor lies along which axes
checkpoints.py  torch.distributed.checkpoint, part by part
planning.py     a search for placements: placements.py says what is tried, hypothetical.py what programs are compiled for
traffic.py      what programs move between devices, and what each of them keeps; pictures.py draws it
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
