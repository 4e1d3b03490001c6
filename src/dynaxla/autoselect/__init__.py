"""Selects an engine (a torch.compile backend) for each graph: engines are compared with eager mode and timed, and the fastest is kept.

Each TorchDynamo graph is compiled by several backends of torch.compile, each of which traces, differentiates and partitions it in its own
way. So one engine is selected for the whole graph: its forward and its backward pass together.
"""
