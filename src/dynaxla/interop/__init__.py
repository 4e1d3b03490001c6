"""PyTorch and JAX beside each other, and in each other's programs; and PyTorch's programs as StableHLO.

torch_in_jax.py    modules and functions of torch as functions of JAX arrays: `to_jax`
torch_graphs.py    their graphs, and autograd's, for given shapes; wide_calls.py: how these stand in JAX's programs
jax_in_torch.py    functions of JAX as functions of torch tensors: `to_torch`; jax_calls.py: how these stand in torch's graphs
sharing.py         one memory seen as a tensor and as an array: `as_jax`, `as_torch`; border.py: how functions that run now take and give it
torch_under_jax.py torch functions of the device "jax" that JAX traces: `as_jax` of a function
export.py          models as StableHLO, which dynaxla/exported/ calls without torch; dynamic_sizes.py: their dynamic dimensions
"""

from .jax_in_torch import to_torch as to_torch
from .sharing import as_jax as as_jax
from .sharing import as_torch as as_torch
from .torch_in_jax import to_jax as to_jax
