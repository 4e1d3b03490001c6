"""Compiles models for TPUs on a machine without one, and reports the programs: `python -m commands.tpu_programs --help`.

libtpu has XLA's compiler for TPUs, which needs no TPU. The compiled programs cannot run: the compiler estimates cycles, and plans memory.

libtpu.py      the folder of libtpu, and the environment of a process that compiles
cells.py       the compilations: models, blocks, attention, optimizers, decoding, many chips
blocks.py      blocks and models that the benchmarks do not have
plain_jax.py   reference implementations of these computations in JAX
programs.py    the programs of a call of torch.compile or compile_step, and of a JAX function
figures.py     the figures of a program: cycles, memory, copies, custom calls, collectives
child.py       the child process
report.py      docs/benchmarks/tpu-programs.md
budgets.json   the figures that must not grow
"""
