"""The rewrites between TorchDynamo's graph and StableHLO. `pipeline.py` lists them in the order in which they run."""
