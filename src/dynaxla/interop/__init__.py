"""PyTorch and JAX side by side in one process and in each other's programs; and PyTorch programs as StableHLO.

torch_in_jax.py     torch modules and functions as functions of JAX arrays: `to_jax`
torch_graphs.py     their graphs and autograd's graphs for given shapes; wide_calls.py: calls of these graphs in JAX's programs
jax_in_torch.py     JAX functions as functions of torch tensors: `to_torch`; jax_calls.py: calls of these functions in torch's graphs
sharing.py          one memory as a tensor and as an array: `as_jax`, `as_torch`; array_conversion.py: around JAX functions that run now
torch_under_jax.py  torch functions on the device "jax", traced by JAX: `to_jax` with device="jax"
export.py           models as StableHLO, which dynaxla/artifact/ runs without torch; dynamic_sizes.py: their dynamic dimensions
"""

from .jax_in_torch import to_torch as to_torch
from .sharing import as_jax as as_jax
from .sharing import as_torch as as_torch
from .torch_in_jax import to_jax as to_jax
