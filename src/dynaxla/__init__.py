"""dynaxla: XLA as a compiler for PyTorch. `torch.compile(model, backend="dynaxla")`."""

from .backend import dynaxla as dynaxla
from .backend import dynaxla_retrace as dynaxla_retrace
from .errors import CaptureError as CaptureError
from .errors import CompilationError as CompilationError
from .errors import DeviceMismatch as DeviceMismatch
from .errors import DynaxlaError as DynaxlaError
from .errors import ExecutionError as ExecutionError
from .errors import LoweringError as LoweringError
from .errors import OptionError as OptionError
from .errors import OutOfMemory as OutOfMemory
from .errors import UnsupportedOp as UnsupportedOp
from .errors import UnsupportedTensor as UnsupportedTensor
from .lowering import lowers as lowers
from .training import compile_step as compile_step

__version__ = "0.1.0"
