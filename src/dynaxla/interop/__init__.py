"""PyTorch functions in JAX programs, JAX functions in PyTorch programs, memory that both share, and PyTorch programs as StableHLO.

torch_in_jax.py      converts torch modules and functions to functions of JAX arrays: `to_jax`
torch_graphs.py      captures a torch function and its gradients as graphs, for given shapes
wide_calls.py        the JAX primitive that calls a captured torch function
torch_under_jax.py   torch functions on the device "jax", traced by JAX: `to_jax` with device="jax"
jax_in_torch.py      converts JAX functions to functions of torch tensors: `to_torch`
jax_calls.py         the torch op that calls a JAX function in torch's graphs
sharing.py           the same memory as a tensor and as an array: `as_jax`, `as_torch`
array_conversion.py  conversion of operands and results around JAX functions
export.py            exports models as StableHLO, which dynaxla/artifact/ runs without torch
dynamic_sizes.py     dynamic dimensions of exported models
"""

from .jax_in_torch import to_torch as to_torch
from .sharing import as_jax as as_jax
from .sharing import as_torch as as_torch
from .torch_in_jax import to_jax as to_jax
