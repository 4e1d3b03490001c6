"""What XLA makes of models for an H100, seen on a machine without a GPU: `python -m commands.gpu_programs --help`.

XLA's CUDA plugin compiles for a GPU that it is only told of, and torch's CPU build traces fake tensors on "cuda" once somebody has told it
that there is such a device. What is compiled cannot be run, and XLA cannot measure its choices: numbers of kernels, copies and the
memory that a program needs are right, times and tiles are not known.

target.py    what XLA is told of an H100
guard.cpp    what torch is told: a CUDA device, streams, which attention there is; guard.py compiles and loads it
fakes.py     models and tensors that are fake ones on "cuda"
programs.py  the compiled programs of a call, as the backend makes them
models.py    which models, in which precision and layout
child.py     the process of one model; runner.py: the processes, one after the other, and what they have found
budgets.json the figures that must not grow
report.py    docs/benchmarks/gpu-programs.md
"""
