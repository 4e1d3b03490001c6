"""The benchmark, `dynaxla bench` or `python -m dynaxla.bench`: repeats the experiment of the TorchDynamo and XLA integration of 2022."""
