"""The parts that only XLA:CPU needs.

onednn.py, torch_kernels.py   calls of oneDNN's and of torch's kernels
onednn_support.py             where oneDNN's calls are used; weight_orders.py: the order in which oneDNN reads weights
faster_kernels.py             ops that are left to torch's kernels, by what that saves
transposes.py, halves.py      passes over a traced program (evaluation.py): transposes put off, bfloat16 rounded seldom
channels_last.py              how activations lie in memory between convolutions
in_memory.py                  results that are written to memory, and read from there; shared_values.py: those of a graph
folding.py, window_maxima.py, exponential.py
                              what XLA:CPU does not vectorize by itself
"""
