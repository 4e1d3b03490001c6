"""Every model of the benchmark and every entry of PyTorch's database of operators, lowered for GPUs and TPUs that are not there:
`python -m commands.lower_everywhere --help`.

Graphs are captured on the CPU with the platform's decompositions, and moved to its device. They become StableHLO, as the backend makes it
there, but are not compiled: that needs neither a plugin nor a compiler, and finds what has no lowering on the platform, and what would call
code that only exists on another. With `--compile tpu`, libtpu also compiles them, which needs no TPU: that finds what the compiler refuses,
and what ends its process.

cases.py         which cases there are
capture.py       a case's graphs, as AOTAutograd gives them
lower.py         a graph as StableHLO for a platform, and which functions it calls
expected.py      which calls exist where, and which cases cannot be lowered or compiled, with reasons
trial.py         one case, judged
tpu_compiler.py  processes that compile for a TPU, one after the other, and what they have found; tpu_child.py: such a process
"""
