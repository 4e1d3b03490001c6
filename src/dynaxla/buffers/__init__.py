"""Conversion of torch tensors to the input arrays of an XLA program, and of the program's result arrays to torch tensors.

protocol.py      the interfaces `Buffers` (a graph with concrete sizes) and `Binding` (a compiled program)
output_plan.py   the plan of a graph's outputs: the input or program result whose memory each output uses
native.py        the implementation for torch's own memory, on the CPU and on NVIDIA GPUs
arguments.py     imports of a call's tensors as arrays that share their memory
device_kinds.py  the registry of implementations for other torch devices, such as the device "jax"
overlaps.py      detection of inputs that share elements
lost_writes.py   detection of writes to views that AOTAutograd would lose
addresses.py     functions that depend on memory addresses; no address leaves this package
"""
