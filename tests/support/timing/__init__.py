"""Cheaper compilation by TorchDynamo and XLA, and a background compilation that a test can pause."""
