"""Rewrites of traced programs (jaxprs), before they are lowered to StableHLO.

evaluation.py          the base class of passes that evaluate a traced program a second time
transposes.py          defers transposes on the CPU (reshapes.py: reshapes in another memory order)
bfloat16_rounding.py   rounds bfloat16 as rarely as possible on the CPU
partitionable.py       makes programs that XLA's partitioner can shard
prechecks.py           moves checks into a separate program
open_layouts.py        lets XLA choose layouts; sets the shardings of results
"""
