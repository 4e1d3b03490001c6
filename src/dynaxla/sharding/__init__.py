"""One program on several devices: tensors on the device "jax" whose arrays lie on a mesh, where XLA's partitioner decides what moves.

mesh.py      devices with axes
marking.py   which dimension of a tensor lies along which axes
traffic.py   what a compiled program moves between devices, and what each of them keeps
"""

from .marking import local_shards as local_shards
from .marking import mark_sharding as mark_sharding
from .marking import shard_module as shard_module
from .marking import sharding_of as sharding_of
from .mesh import Mesh as Mesh
from .traffic import report as report
