"""Rewrites of functional ATen graphs, and their division into parts that run one after the other."""
