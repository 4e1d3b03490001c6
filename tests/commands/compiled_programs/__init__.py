"""Common parts of the commands that compile for devices that this machine does not have: gpu_programs, tpu_programs, lower_everywhere.

hlo.py        the instructions of an optimized program, from its text
results.py    the results of runs, in a file that an interrupted run continues
processes.py  the processes that compile, one after another
budgets.py    figures that must not grow, in a budgets.json
"""
