"""How torch tensors become the arrays of a function, and its results become torch tensors.

protocol.py   what a kind of memory must offer
plan.py       which results lie in whose memory
native.py     torch's own memory on the CPU and on NVIDIA GPUs; arguments.py: the aliases of tensors that a program reads
addresses.py  what depends on where tensors lie: no address leaves this package
"""
