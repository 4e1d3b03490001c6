"""Rewrites of traced programs (jaxprs), before they are lowered to StableHLO.

evaluation.py          base class of the passes that evaluate a traced program once more
transposes.py          defers transposes on the CPU (reshapes.py: reshapes in another memory order)
bfloat16_rounding.py   rounds bfloat16 as rarely as possible on the CPU
partitionable.py       programs that XLA's partitioner can shard
prechecks.py           checks as a program of their own
open_layouts.py        layouts that XLA chooses; shardings of results
"""
