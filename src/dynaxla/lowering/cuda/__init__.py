"""The parts that only XLA:GPU with NVIDIA's libraries needs.

fused_attention.py   cuDNN's attention, which keeps no scores in memory
"""
