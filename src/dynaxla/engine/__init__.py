"""Engines: they compile graphs and run them.

protocol.py         the interfaces of an engine, and of the runner that an engine returns for a graph
scheduler.py        builds the schedule (schedule.py) of a graph that needs several programs, or steps outside of XLA
xla.py              the XLA engine: one program for each combination of input sizes (executable.py holds one program)
unit.py             a graph to compile, with the facts that do not depend on its sizes
compile.py          the steps from a graph with concrete sizes to an executable: trace, lower, compile, bind (options.py: XLA's own options)
build.py            chooses how a graph with concrete sizes runs: by a stored program (stored.py), a newly compiled one, or torch's kernels
program_cache.py    the executables of a graph by sizes, compiled by the caller or in the background
retrace.py          a baseline that works as lazy tensors do: it traces the graph at every call
"""
