"""Compiles models for an H100 on a machine without a GPU, and counts kernels and copies: `python -m commands.gpu_programs --help`.

XLA's CUDA plugin compiles for a GPU that is only described to it, and torch's CPU build traces fake tensors on "cuda" if such a device is
registered. The compiled programs cannot run, and XLA cannot measure its choices: the numbers of kernels and copies and a program's memory
are correct, but times and tile sizes are not known.

target.py    the description of an H100 for XLA
guard.cpp    registers a CUDA device, streams and a choice of attention with torch; guard.py compiles and loads it
fakes.py     fake models and tensors on "cuda"
programs.py  the compiled programs of a call of a torch.compile function
models.py    the models, with their precisions and layouts
child.py     the process of one model; runner.py: all processes, one after another, and their results
budgets.json the figures that must not grow
report.py    docs/benchmarks/gpu-programs.md
"""
