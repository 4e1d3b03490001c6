"""Conversion of torch tensors to a program's input arrays, and of its result arrays to torch tensors.

protocol.py      the interface of each kind of memory
output_plan.py   the assignment of outputs to memory
native.py        torch's own memory on the CPU and on NVIDIA GPUs; arguments.py: aliases of the tensors that a program reads
overlaps.py      inputs that share elements; lost_writes.py: writes to views that AOTAutograd would lose
addresses.py     functions that depend on memory addresses; no address leaves this package
"""
