"""Exported models: StableHLO, weights, and what is known of both. Nothing in this folder needs torch: `dynaxla.load_artifact` and what it
gives work in a process that has JAX and safetensors alone."""
