"""Code that only XLA:TPU needs.

pallas_attention.py   attention kernels that do not store the scores
uncompilable_ops.py   ops that the compiler does not compile
"""
