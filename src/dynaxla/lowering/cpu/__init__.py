"""Code that only XLA:CPU needs.

onednn.py, torch_kernels.py   calls of oneDNN's and of torch's kernels
flash_attention.py            torch's attention kernels
onednn_support.py             decides where oneDNN's calls are used
weight_orders.py              weights prepacked in oneDNN's own layout
faster_kernels.py             ops that torch's kernels compute faster than XLA, with the time that they save
unfusable_graphs.py                   graphs without anything to fuse, which torch runs
channels_last.py              memory order of activations between convolutions
inplace_updates.py              in-place updates of slices, restored after functionalization
materialize.py                  writes an intermediate result to memory; shared_values.py chooses these results in a graph
gemv.py, split_k_gemv.py, widening.py
                              matrix products with few rows or half types
vectorized_reductions.py, window_maxima.py, exponential.py
                              reductions and functions that XLA:CPU does not vectorize by itself
"""
