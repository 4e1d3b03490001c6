"""Lowers ATen graphs to JAX: the registry of lowerings, and the interpreter that walks a graph under jax tracing."""

from ..runtime import quiet_jax as quiet_jax  # before anything else imports JAX
from .checks import Check as Check
from .context import Context as Context
from .interpreter import Interpreter as Interpreter
from .metadata import SymbolValues as SymbolValues
from .metadata import TensorSpec as TensorSpec
from .registry import lowers as lowers
from .registry import registry as registry
from .settings import Settings as Settings
