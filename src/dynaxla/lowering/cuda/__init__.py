"""Code that only XLA:GPU with NVIDIA's libraries needs.

fused_attention.py   cuDNN's flash attention
"""
