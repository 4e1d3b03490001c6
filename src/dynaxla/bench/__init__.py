"""The benchmark: the experiment of the TorchDynamo and XLA integration of 2022, repeated. `dynaxla bench`, or `python -m dynaxla.bench`."""
