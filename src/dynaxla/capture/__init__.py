"""Turns TorchDynamo's graphs into functional ATen graphs, and describes how the inputs and outputs of these lie in memory."""
