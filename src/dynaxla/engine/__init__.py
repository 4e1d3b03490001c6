"""Engines: they compile ATen graphs and run them. The modules, in the order in which a graph meets them:

protocol.py           the interfaces of an engine, and of the runner that an engine returns for a graph
scheduler.py          builds the schedule (schedule.py) of a graph that needs several programs, or work that no program can do
frozen_values.py      keeps values that depend only on parameters and buffers (option freeze)
bucket.py             one program for many sizes: rounds sizes, pads inputs (padded_calls.py), times torch's kernels (eager_timings.py)
xla.py                the XLA engine: one executable for each combination of input sizes
unit.py               a graph to compile, with the facts that do not depend on its sizes
program_cache.py      the executables of a graph by sizes, compiled by the caller or in the background
build.py              chooses how a graph with concrete sizes runs: torch's kernels, a stored program, or a newly compiled one
stored.py             programs of earlier traces of an equal graph, found by records on disk (records.py)
blocks.py             equal blocks of a graph as calls of one program
compile.py            from a graph with concrete sizes to an executable: trace (trace_outputs.py), lower, compile (options.py), bind
executable.py         a compiled program with its binding to tensors
eager_executable.py   a graph that torch's kernels run, until its program is ready or always

Other runners: artifact.py (can be pickled, for aot_compile), partitioned.py (split among processes by XLA), retrace.py (a baseline that
traces at every call, as lazy tensors do). dry_run.py stops a call at its first program.
"""
