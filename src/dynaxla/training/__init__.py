"""Training: a whole step (forward, backward, optimizer) as XLA programs.

step.py          `compile_step`; decides for each call: replay a program, run in eager mode, or record
replayed_steps.py  the programs of a step; a program replaces the step's Python code in every call whose state matches the recorded state
value_reads.py   detects in eager mode that Python reads tensors' values; eager_collectives.py: a program's collectives, in eager mode
recorded_graph.py  an executable graph: an XLA program, then in-place updates by torch's own kernels (updates.py, fused_steps.py)
recorder.py      runs the function once on fake tensors and records every ATen op below autograd; recordings.py: the result of this run
traced_numbers.py  Python numbers, such as learning rates and counters, as inputs of the program; tracked_arrays.py: NumPy arrays as inputs
draws.py         random draws that a step repeats, as activation checkpointing does when it recomputes a region
recording_settings.py  settings that only the recording thread sees; unrecordable.py: checks that refuse a recording
parallel_modules.py  DistributedDataParallel (data_parallel.py) and FSDP2 (fully_sharded.py) in a step
local_shards.py  DTensors in fused optimizer steps
inplace_collectives.py  in-place collectives of `torch.distributed` as functional ones
"""

from ..runtime import quiet_jax as quiet_jax  # before anything else imports JAX
from .step import compile_step as compile_step
