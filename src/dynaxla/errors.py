"""The exceptions that dynaxla raises. Each exception has its facts as fields, and a hint with a remedy.

The exceptions derive from TorchDynamo's `ShortenTraceback`, so that `torch.compile` raises them as they are, and does not wrap them in
`BackendCompilerFailed`. Their tracebacks have the user's frames and the innermost frame. With TORCHDYNAMO_VERBOSE=1 (torch's own switch for
full tracebacks), the tracebacks have all frames, and the causes of the exceptions.
"""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING, Any

from . import user_frames

if TYPE_CHECKING:
    from torch._dynamo.exc import ShortenTraceback
else:
    try:
        from torch._dynamo.exc import ShortenTraceback
    except ImportError:  # a process without torch may still call exported programs

        class ShortenTraceback(RuntimeError):
            def __init__(self, message: str, *, first_useful_frame: None) -> None:
                super().__init__(message)


class DynaxlaError(ShortenTraceback):
    """Base class of every error that dynaxla raises.

    Attributes:
        message: a description of the problem.
        op: the ATen overload, or "".
        inputs: the dtypes and shapes of the inputs, or "".
        where: the line of the user's code, or "".
        hint: a remedy, or "".
    """

    def __init__(self, message: str, *, op: str = "", inputs: str = "", where: str = "", hint: str = "") -> None:
        self.message, self.op, self.inputs, self.where, self.hint = message, op, inputs, where, hint
        lines = [message]
        lines += [f"  op:     {op}"] if op and op not in message else []
        lines += [f"  input:  {inputs}"] if inputs else []
        lines += [f"  from:   {where}"] if where else []
        lines += [f"  try:    {hint}"] if hint else []
        super().__init__("\n".join(lines), first_useful_frame=None)

    def remove_dynamo_frames(self) -> Any:
        """Returns this error with a short traceback. torch.compile calls this method, and raises the result without its cause."""
        if user_frames.is_verbose():
            if cause := self.__cause__ or self.__context__:
                self.add_note(f"The cause:\n{''.join(traceback.format_exception(cause)).rstrip()}")
            return self
        return user_frames.with_user_frames_only(self)


class OptionError(DynaxlaError):
    """An option or mode given to `torch.compile` is unknown or has a wrong value."""


class ArgumentError(DynaxlaError):
    """A function of dynaxla, or a function that `dynaxla.to_jax` returned, got an argument that it does not support."""


class CaptureError(DynaxlaError):
    """A step, function or model cannot be captured as one program, for example because it reads a tensor's value."""


class UnsupportedOp(DynaxlaError):
    """The graph has an op, or a use of an op, without a lowering."""


class UnsupportedTensor(DynaxlaError):
    """XLA does not support a tensor, for example because it is sparse, quantized, or on a device that JAX does not support."""


class DeviceMismatch(DynaxlaError):
    """The tensors of one program are on different devices."""


class LoweringError(DynaxlaError):
    """A lowering failed, or returned another shape or dtype than PyTorch. This is a bug in dynaxla (or in a user's lowering)."""


class CompilationError(DynaxlaError):
    """XLA's compiler rejected the program."""


class ExecutionError(DynaxlaError):
    """The compiled program failed at run time. Inputs are unchanged."""


class UnsupportedVersion(DynaxlaError):
    """The installed torch, JAX or jaxlib lacks an op, a feature or a private entry point that dynaxla needs."""


class ArtifactError(DynaxlaError):
    """An exported model or compiled artifact cannot be written or used: it is damaged, from another environment, or called wrongly."""


class ForkError(DynaxlaError):
    """XLA is needed in a process that was forked from a process that had used XLA."""


class CollectiveMismatch(ExecutionError):
    """The processes of a group are about to call different collectives. Inputs are unchanged.

    No process has begun its collective, unless its program has run before: such a process does not compare first. If one has begun, the
    group cannot be used any more.
    """


class CollectiveFailed(ExecutionError):
    """A collective of a program failed, or another process did not reach it because it ended or hangs.

    Inputs are unchanged, and the group cannot be used any more.
    """


class OutOfMemory(ExecutionError):
    """The device has too little memory for the program. Inputs are unchanged."""
