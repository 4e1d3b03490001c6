"""Code that only XLA:TPU needs.

pallas_attention.py   attention kernels that do not store the scores
"""
