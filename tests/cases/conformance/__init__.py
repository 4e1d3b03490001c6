"""PyTorch's databases of operators and modules, compiled with dynaxla and compared with eager mode: `python -m cases.conformance --help`.

entries.py   the cases, and the calls of each case
calls.py     a call as source text and tensors, so that TorchDynamo compiles the code that a user would write
judge.py     the comparison of two results; ambiguous.py: of results that are not unique; randomness.py: of random results
trial.py     runs one call, or several compiled as one function, and compares it with eager mode; asks torch's "aot_eager" if they differ
worker.py    a process that runs cases; pool.py: the processes, their time limits and crashes
telling.py   the calls of op_db that `make test` compares
device_suite.py   the device "jax", in eager or lazy mode
expected.py  the cases that are known to fail, with reasons
observed.py  the ops that XLA or torch's kernels ran
report.py    the summary and docs/op_coverage.md
"""
