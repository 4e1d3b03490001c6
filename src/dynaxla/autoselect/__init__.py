"""Selects an engine (a torch.compile backend) for each graph: engines are compared with eager mode and timed, and the fastest is kept.

Several engines compile each TorchDynamo graph. Each engine traces, differentiates and partitions the graph in its own way. So one engine is
selected for the forward and the backward pass of a graph together.
"""
