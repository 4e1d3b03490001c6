"""The public names of dynaxla, and the module of each. `__init__.py` reads the lines below, too: they are the only list."""

from . import device as device
from . import errors as errors
from . import sharding as sharding
from .artifact.model import load as load
from .explained import explain as explain
from .interop import as_jax as as_jax
from .interop import as_torch as as_torch
from .interop import to_jax as to_jax
from .interop import to_torch as to_torch
from .interop.export import export as export
from .lowering import lowers as lowers
from .observe import metrics as metrics
from .runtime.synchronization import synchronize as synchronize
from .training import compile_step as compile_step

__version__: str
