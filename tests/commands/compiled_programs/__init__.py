"""What XLA's compilers make of models for devices that this machine does not have; for `commands.gpu_programs` and `commands.tpu_programs`.

hlo.py        the instructions of an optimized program, from its text
results.py    the results of runs, in a file that an interrupted run continues
processes.py  the processes that compile, one after another
budgets.py    figures that must not grow, in a budgets.json
"""
