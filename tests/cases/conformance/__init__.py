"""PyTorch's own databases of operators and modules, compiled with dynaxla and compared with eager: `python -m cases.conformance --help`.

entries.py   which cases there are, and each case's calls
calls.py     one call as source text and tensors, so that TorchDynamo compiles what a user would write
judge.py     the comparison of two results; ambiguous.py: of results that are not unique
trial.py     one call, or several compiled as one function: eager, compiled, judged; torch's own "aot_eager" is asked when they differ
worker.py    a process that runs cases; pool.py: the processes, their time limits and crashes
device_suite.py   the device "jax", in eager or lazy mode
expected.py  the cases that are known to fail, with reasons
report.py    the summary and docs/op_coverage.md
"""
