"""What compiles graphs and runs them.

protocol.py       what an engine is
xla.py            XLA: a program for each combination of input sizes (executable.py: one of them)
making.py         who runs such a combination: a program that is found, or compiled, or torch's kernels
stages.py         the steps from a graph with sizes to an executable (options.py: XLA's own options)
retrace.py        the same as lazy tensors would do it: traced again at every call
compositions.py   engines made of others: graphs cut around what no program holds, graphs whose parameters seldom change
"""
