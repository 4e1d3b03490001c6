"""Code that only XLA:TPU needs.

pallas_attention.py   attention kernels that do not store the scores
refusals.py           errors that are raised if a function for all platforms is lowered for a TPU
uncompilable_ops.py   ops that the compiler does not compile
"""
