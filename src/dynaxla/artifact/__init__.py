"""Exported models: StableHLO, weights, and a manifest.

No module in this folder needs torch: `dynaxla.load` and the models that it returns need only JAX and safetensors.
"""
