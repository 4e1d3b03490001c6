"""ATen graphs to JAX: the registry of lowerings, and the interpreter that walks a graph under jax tracing."""

from ..runtime import quiet_jax as quiet_jax  # before anything else imports JAX
from . import ops as ops
from .context import Check as Check
from .context import Context as Context
from .context import Settings as Settings
from .context import SymbolValues as SymbolValues
from .context import TensorSpec as TensorSpec
from .interpreter import Interpreter as Interpreter
from .registry import lowers as lowers
from .registry import registry as registry
