"""Lowers all models of the benchmark and all entries of PyTorch's database of operators for GPUs and TPUs, on a machine without them:
`python -m commands.lower_everywhere --help`.

Graphs are captured on the CPU with the platform's decompositions, moved to the platform's device, and lowered to the StableHLO that the
backend would compile there. This needs no plugin and no compiler, and finds ops without a lowering on the platform, and calls of functions
that exist only on another platform. With `--compile tpu`, libtpu compiles the programs, too, which needs no TPU. This finds programs that
the compiler refuses, or for which it ends the process.

cases.py         the cases
capture.py       AOTAutograd's graphs of a case
lower.py         a graph as StableHLO for a platform, and the functions that it calls
expected.py      the functions of each platform, and the cases that cannot be lowered or compiled, with reasons
trial.py         the outcome of a case, compared with the expected one
tpu_compiler.py  the processes that compile for a TPU, one after another, and their results; tpu_child.py: such a process
"""
