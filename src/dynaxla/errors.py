"""Exceptions that users meet. Each carries its facts as fields and says what to do.

They derive from TorchDynamo's `ShortenTraceback` so that `torch.compile` passes them on as they are, instead of wrapping them in
`BackendCompilerFailed`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._dynamo.exc import ShortenTraceback
else:
    try:
        from torch._dynamo.exc import ShortenTraceback
    except ImportError:  # a process without torch, which calls exported programs

        class ShortenTraceback(RuntimeError):
            def __init__(self, message: str, *, first_useful_frame: None) -> None:
                super().__init__(message)


class DynaxlaError(ShortenTraceback):
    """Base class of every error that dynaxla raises.

    Attributes: message (what happened), op (ATen overload or ""), inputs (dtypes and shapes), where (the user's line), hint (what to do).
    """

    def __init__(self, message: str, *, op: str = "", inputs: str = "", where: str = "", hint: str = "") -> None:
        self.message, self.op, self.inputs, self.where, self.hint = message, op, inputs, where, hint
        lines = [message]
        lines += [f"  op:     {op}"] if op and op not in message else []
        lines += [f"  input:  {inputs}"] if inputs else []
        lines += [f"  from:   {where}"] if where else []
        lines += [f"  try:    {hint}"] if hint else []
        super().__init__("\n".join(lines), first_useful_frame=None)


class OptionError(DynaxlaError):
    """An option or mode given to `torch.compile` is unknown or has a wrong value."""


class ArgumentError(DynaxlaError):
    """A function of `dynaxla.to_jax` is called with what it cannot take: another tree of parameters, no random key, a torch tensor."""


class CaptureError(DynaxlaError):
    """A training step cannot be recorded as one program, or a function cannot be one of JAX's: it looks at a tensor's value, say."""


class UnsupportedOp(DynaxlaError):
    """The graph holds an op, or a use of an op, that has no lowering."""


class UnsupportedTensor(DynaxlaError):
    """A tensor that XLA cannot take: sparse, quantized, meta, or on a device that JAX does not drive."""


class DeviceMismatch(DynaxlaError):
    """The tensors of one program live on different devices."""


class LoweringError(DynaxlaError):
    """A lowering failed, or gave a shape or dtype other than PyTorch's. A defect of dynaxla (or of a user's lowering)."""


class CompilationError(DynaxlaError):
    """XLA's compiler refused the program."""


class ExecutionError(DynaxlaError):
    """The compiled program failed while it ran. Inputs are unchanged."""


class UnsupportedVersion(DynaxlaError):
    """This torch, JAX or jaxlib lacks something that dynaxla needs and that has no public name."""


class ArtifactError(DynaxlaError):
    """A compiled artifact cannot be written, or cannot be used here: it is damaged, or was made elsewhere."""


class ForkError(DynaxlaError):
    """XLA is needed in a process that was forked from one that had used it."""


class CollectiveMismatch(ExecutionError):
    """The processes of a group are about to call different collectives. Inputs are unchanged.

    No process has begun the collective, unless one runs a program that it has run before: then the group cannot be used any more.
    """


class CollectiveFailed(ExecutionError):
    """A collective of a program failed, or another process did not come to it: it has ended, or hangs. Inputs are unchanged, and the group
    cannot be used any more."""


class OutOfMemory(ExecutionError):
    """The device had too little memory for the program. Inputs are unchanged."""
