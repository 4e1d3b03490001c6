"""Engines: they compile graphs and run them.

protocol.py       the interface of an engine
xla.py            the XLA engine: one program for each combination of input sizes (executable.py holds one program)
making.py         chooses how a graph with concrete sizes runs: by a stored program, a newly compiled one, or torch's kernels
stages.py         the steps from a graph with concrete sizes to an executable (options.py: XLA's own options)
retrace.py        a baseline that works as lazy tensors do: it traces the graph at every call
scheduler.py      makes the schedule (schedule.py) of a graph that needs several programs, or work that no program does
"""
