"""Conversion of torch tensors to a program's input arrays, and of its result arrays to torch tensors.

protocol.py    the interface of each kind of memory
output_plan.py        the assignment of results to memory
native.py      torch's own memory on the CPU and on NVIDIA GPUs; arguments.py: aliases of the tensors that a program reads
addresses.py   functions that depend on memory addresses; no address leaves this package
"""
