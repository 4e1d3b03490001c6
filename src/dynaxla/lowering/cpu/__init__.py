"""Code that only XLA:CPU needs.

onednn.py, torch_kernels.py   calls of oneDNN's kernels, and of torch's
flash_attention.py            calls of torch's attention kernels
onednn_support.py             dtypes and sizes for which oneDNN is used
measurements.py               measured times of single ops, by which torch's kernels or XLA's loops are chosen
faster_kernels.py             ops that torch's kernels compute faster than XLA
unfusable_graphs.py           graphs without anything to fuse, which torch runs
channels_last.py              memory order of activations between convolutions
inplace_updates.py            in-place updates of slices, restored after functionalization
materialize.py                writes of intermediate results to memory; shared_values.py chooses these results
gemv.py, split_k_gemv.py, widening.py
                              matrix products with few rows or half types
vectorized_reductions.py, window_maxima.py, exponential.py
                              reductions and functions that XLA:CPU does not vectorize by itself
"""
