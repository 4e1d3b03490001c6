"""Rewrites of TorchDynamo's graph, before AOTAutograd sees it."""
