"""No graph behind the best engine: engines compete for each graph, are compared with eager mode, timed, and the fastest is kept.

A graph of TorchDynamo's is given to several backends of torch.compile, each of which traces, differentiates and partitions it in its own
way. So an engine is taken for a graph as a whole, its forward and its backward pass together.
"""
