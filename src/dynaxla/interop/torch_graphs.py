"""Captures a torch function, for operands of given shapes, as calls for JAX's programs, with autograd's derivative."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import jax
import numpy as np
import torch
import torch._dynamo
import torch.fx.traceback
from jax import Array, lax
from jax import numpy as jnp
from torch._dynamo.exc import TorchDynamoException
from torch._functorch.aot_autograd import aot_export_joint_simple
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..buffers.lost_writes import LostWrite, LostWrites
from ..capture.decompositions import decompositions
from ..errors import CaptureError, DynaxlaError
from ..guards.state_changes import state_of
from ..lowering import dtypes
from ..lowering.eager import PORTABLE
from ..lowering.function import Function, Results
from ..lowering.graphs import user_line
from ..lowering.interpreter import constant_value, draws_random
from ..passes.joint.partition import partition
from ..runtime import capture_lock
from ..torch_ops import aten
from .wide_calls import Call, Derivative, axes_of, narrowed, varying

Tensors = Sequence[torch.Tensor]

_COPIES = (aten.clone.default, aten.detach.default, aten.alias.default)


@dataclass(frozen=True)
class GraphOperand:
    """A tensor that a torch function takes.

    Attributes:
        shape: Its shape.
        dtype: Torch's dtype.
        requires_grad: True if autograd records the operations on it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


class TorchCall(Call):
    """A torch function of tensors with given shapes and dtypes.

    Args:
        function: Takes tensors and returns new tensors; it mutates none of its arguments.
        operands: The tensors that it takes.
        device: The device of the fake tensors with which it is traced.
        narrow: The arrays of the surrounding JAX program have at most 32 bits.
        is_unchanged: Returns True if it is certain that the other state that the function reads has not changed.

    Attributes:
        draws_random: True if it takes a key, as two uint32, before its operands.
        drawing: The user's line that draws first.
        copied: For each result, the index of the operand that it is a copy of; None if it is no copy.

    Raises:
        CaptureError: Python's control flow depends on a tensor's values.
        UnsupportedOp: An op has no lowering.
    """

    def __init__(
        self,
        function: Callable[[Tensors], Tensors],
        operands: Sequence[GraphOperand],
        device: torch.device,
        narrow: bool,
        is_unchanged: Callable[[], bool] = lambda: True,
    ) -> None:
        self._function, self._operands, self._device, self._narrow = function, list(operands), device, narrow
        self._is_unchanged = is_unchanged
        with _disable_current_modes(), capture_lock.capturing():
            graph = self._graph([False] * len(operands))
            program = Function.portable(graph)
        self._code = _code(graph)
        self._constants = [(tensor, state_of(tensor)) for tensor in _constants(graph)]
        self.draws_random = program.draws_random
        self.drawing = next((user_line(node) for node in _nodes(graph) if draws_random(node)), "")
        placeholders, results = graph.graph.find_nodes(op="placeholder"), graph.graph.output_node().args[0]
        self._results = [node.meta["val"].dtype for node in results]
        self.copied = [placeholders.index(source) if (source := _source(node)) in placeholders else None for node in results]

        def run(*given: Array) -> list[Array]:
            outputs = self._outputs(program, given)
            return [self._narrowed(output) for output in outputs]

        super().__init__(run)

    def is_current(self) -> bool:
        """True if the tensors that are constants of the graph have kept their values."""
        return all(state_of(tensor) == state for tensor, state in self._constants)

    def _check_unchanged(self) -> None:
        """Checks that the function still has the graph that was traced, since its derivative is traced later.

        Raises:
            CaptureError: It has another graph now.
        """
        if self.is_current():
            if self._is_unchanged():
                return
            again = self._graph([False] * len(self._operands))
            pairs = zip(_constants(again), self._constants, strict=False)
            if _code(again) == self._code and all(new is old or _same(new, old) for new, (old, _) in pairs):
                return
        raise CaptureError(
            "a value that a torch function reads has changed since JAX traced the function, so its derivative would be wrong",
            hint="call jax.jit again after the change, or pass the changing value as an argument",
        )

    def derivative(self, wanted: tuple[bool, ...]) -> Derivative:
        return self._once(("derivative", wanted), lambda: self._by_autograd(wanted))

    @_disable_current_modes()
    def _by_autograd(self, wanted: tuple[bool, ...]) -> Derivative:
        self._check_unchanged()
        mask = list(wanted[1:] if self.draws_random else wanted)
        moving: list[int] = []
        with capture_lock.capturing():
            joint = self._graph(mask, moving)
            if moving:
                inputs = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
                graphs = partition(joint, inputs, platform=PORTABLE, num_fwd_outputs=len(self._results))
                forward, backward = map(Function.portable, graphs)
        count, given = len(self._results), sum(mask)
        if not moving:
            return self._no_derivative(mask)
        forward_graph, backward_graph = graphs
        names = [node.name for node in backward_graph.graph.find_nodes(op="placeholder")]
        results = [getattr(node, "name", None) for node in forward_graph.graph.output_node().args[0]]
        places = [None if name.startswith("tangents") else results.index(name) for name in names]
        kept = [place for place in places if place is not None]
        gradients = backward_graph.graph.output_node().args[0]
        wide = [dtypes.to_jax(self._results[index]) for index in moving]

        def run(*operands: Array) -> list[Array]:
            outputs = self._outputs(forward, operands)
            held = [_packed(outputs[place]) if self._narrow else outputs[place] for place in kept]
            return [*map(self._narrowed, outputs[:count]), *held]

        def pulled(*operands: Array) -> list[Array]:
            held = iter(operands[: len(kept)])
            cotangents = (lax.convert_element_type(item, dtype) for item, dtype in zip(operands[len(kept) :], wide, strict=True))
            values = [next(cotangents) if place is None else next(held) for place in places]
            values = [_conjugated(value) if place is None else value for value, place in zip(values, places, strict=True)]
            values = [_unpacked(value, spec.jax_dtype) for value, spec in zip(values, backward.specs.values(), strict=True)]
            found = iter(backward(values).outputs)
            every = [None if gradient is None else next(found) for gradient in gradients[: len(mask)]]
            own = [(grad, item) for grad, item, want in zip(every, self._operands, mask, strict=True) if want]
            return [lax.full(item.shape, 0, dtypes.to_jax(item.dtype)) if grad is None else _conjugated(grad) for grad, item in own]

        shapes = [joint.graph.output_node().args[0][index].meta["val"].shape for index in moving]

        def pushed(*operands: Array) -> list[Array]:
            held, tangents = operands[: len(kept)], operands[len(kept) :]
            assert len(tangents) == given
            zeros = [
                lax.full(tuple(shape), 0, narrowed(dtype) if self._narrow else dtype) for shape, dtype in zip(shapes, wide, strict=True)
            ]
            axes = axes_of(operands)
            transposed = jax.vjp(lambda *cotangents: varying(pulled(*held, *cotangents), axes), *varying(zeros, axes))[1]
            return list(transposed(list(tangents)))

        refusal = CaptureError(
            "a torch function is differentiated twice, and autograd gives only its first derivative here",
            hint="take the inner derivative in torch (torch.func.grad), inside the function that is given to to_jax",
        )
        return Derivative(Call(run, refusal=refusal), Call(pushed, pulled, refusal), moving)

    def _no_derivative(self, mask: Sequence[bool]) -> Derivative:
        """Returns the derivative where no result depends differentiably on an operand that `mask` wants."""

        def nothing(*_: Array) -> list[Array]:
            return []

        def zeros(*_: Array) -> list[Array]:
            return [lax.full(item.shape, 0, dtypes.to_jax(item.dtype)) for item, want in zip(self._operands, mask, strict=True) if want]

        return Derivative(Call(self.run), Call(nothing, zeros), ())

    def _outputs(self, program: Function, given: Sequence[Array]) -> list[Array]:
        key = None
        if self.draws_random:
            key, given = jax.random.wrap_key_data(given[0], impl="threefry2x32"), given[1:]
        arrays = [lax.convert_element_type(array, spec.jax_dtype) for array, spec in zip(given, program.specs.values(), strict=True)]
        found = program(arrays, key if program.draws_random else None)
        return _marked(found)

    def _narrowed(self, array: Array) -> Array:
        return lax.convert_element_type(array, narrowed(array.dtype) if self._narrow else array.dtype)

    def _graph(self, wanted: Sequence[bool], moving: list[int] | None = None) -> GraphModule:
        """Returns the function's graph; a joint graph with gradients if any operand is wanted.

        Dispatch modes must be off around it: they are the user's, or those of another trace, which the surrounding JAX function is part of.

        Args:
            moving: Receives the indices of the results that have a gradient.
        """
        joint = any(wanted)
        sizes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        fakes = FakeTensorMode(allow_non_fake_inputs=True, shape_env=sizes)
        with fakes:
            inputs = [torch.empty(item.shape, dtype=item.dtype, device=self._device) for item in self._operands]
        for tensor, want in zip(inputs, wanted, strict=True):
            tensor.requires_grad_(want)

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            if joint:
                results = self._function(tensors)
                if moving is not None:
                    moving[:] = [index for index, result in enumerate(results) if result.requires_grad]
                return list(results)
            with torch.enable_grad():  # without gradients the function may take another code path
                given = [
                    tensor.detach().requires_grad_() if item.requires_grad else tensor
                    for tensor, item in zip(tensors, self._operands, strict=True)
                ]
                return [result.detach() for result in self._function(given)]

        with (
            capture_lock.capturing(), torch.inference_mode(False), torch.set_grad_enabled(joint), _explained(),
            torch.fx.traceback.preserve_node_meta(), _Lines(), _Writes(),
            # TorchDynamo, which captures control flow, would turn a float that has changed once into an operand, which has no value here.
            torch._dynamo.config.patch(specialize_float=True),
        ):  # fmt: skip
            graph: Any = aot_export_joint_simple(function, tuple(inputs), trace_joint=joint, decompositions=decompositions(PORTABLE))
        _check_constants(graph)
        return graph


def _source(node: Node) -> Node:
    """Returns the node that a node is a copy of, or the node itself."""
    while node.target in _COPIES:
        node = node.args[0]
    return node


def _packed(array: Array) -> Array:
    """Splits 64-bit numbers into halves, which 32-bit JAX can hold without loss."""
    if array.dtype.itemsize < 8 or array.dtype == np.complex64:
        return array
    if dtypes.is_complex(array.dtype):
        return jnp.stack([_packed(lax.real(array)), _packed(lax.imag(array))])
    return lax.bitcast_convert_type(array, np.dtype(np.uint32))


def _unpacked(array: Array, dtype: dtypes.DType) -> Array:
    if array.dtype == dtype:
        return array
    if dtypes.is_complex(dtype):
        half = dtypes.real(dtype)
        return lax.complex(_unpacked(array[0], half), _unpacked(array[1], half))
    return lax.bitcast_convert_type(array, dtype)


def _conjugated(array: Array) -> Array:
    """Converts between torch's gradients of complex numbers and JAX's cotangents, which are conjugates of each other."""
    return lax.conj(array) if dtypes.is_complex(array.dtype) else array


def _marked(results: Results) -> list[Array]:
    """Returns the outputs. If a check of eager mode fails, such as one of an index, the floating-point outputs are NaN, as in JAX's own
    indexing.
    """
    outputs = list(results.outputs)
    if not results.checks:
        return outputs
    holds = results.checks[0].condition
    for check in results.checks[1:]:
        holds = lax.bitwise_and(holds, check.condition)
    return [jnp.where(holds, output, jnp.full_like(output, np.nan)) if dtypes.is_inexact(output.dtype) else output for output in outputs]


def _graphs(graph: GraphModule) -> list[GraphModule]:
    """Returns the graph, and the branches and bodies of the control flow in it."""
    return [module for module in graph.modules() if isinstance(module, GraphModule)]


def _nodes(graph: GraphModule) -> Iterator[Node]:
    return (node for part in _graphs(graph) for node in part.graph.nodes)


def _constants(graph: GraphModule) -> list[torch.Tensor]:
    values = [constant_value(part, node) for part in _graphs(graph) for node in part.graph.find_nodes(op="get_attr")]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _code(graph: GraphModule) -> list[str]:
    return [part.code for part in _graphs(graph)]


def _same(new: torch.Tensor, old: torch.Tensor) -> bool:
    return (new.dtype, new.shape) == (old.dtype, old.shape) and torch.equal(new, old)


def _check_constants(graph: GraphModule) -> None:
    """Checks the tensors in the graph that come from outside the function.

    Raises:
        CaptureError: One of them is no constant.
    """
    for node in graph.graph.find_nodes(op="get_attr"):
        constant = constant_value(graph, node)
        if not isinstance(constant, torch.Tensor):
            continue
        where = next((line for user in node.users if (line := user_line(user))), "")
        if isinstance(constant, (FakeTensor, FunctionalTensor)):
            raise CaptureError(
                "the function reads a tensor that an earlier trace has stored, and that has no values",
                where=where,
                hint="do not keep tensors in globals, closures or caches: return them",
            )
        if constant.requires_grad:
            raise _read_from_elsewhere(constant, where)


def _read_from_elsewhere(tensor: torch.Tensor, where: str) -> CaptureError:
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor with requires_grad"
    return CaptureError(
        f"the function reads a {kind} that is not one of its own: its value would be a constant, without a gradient",
        where=where,
        hint="give to_jax the module that owns it, or pass it as an argument; if the module filled a cache with it, empty the cache",
    )


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Converts torch's exceptions for data-dependent code, and for writes that would be lost, to errors with hints.

    Raises:
        CaptureError: In place of them.
    """
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise CaptureError(
            "the function's control flow, or a size in it, depends on the values of a tensor "
            f"({getattr(error, 'func', None) or type(error).__name__}): JAX traces a function with shapes, without values",
            where=_line(error),
            hint="use torch.where or torch.cond, or compute the number before the call and pass it as a Python number",
        ) from None
    except DynaxlaError:
        raise
    except TorchDynamoException as error:
        reason = " ".join(str(error).partition("\n  Hint:")[0].split())
        raise CaptureError(
            f"torch cannot capture a function that is given to torch.cond, while_loop, scan or torch.compile: {reason}",
            where=_line(error, getattr(error, "real_stack", None) or ()),
            hint="write it so that torch.compile(..., fullgraph=True) accepts it; torch's own error, above this one, has the details",
        ) from error
    except LostWrite as error:
        raise CaptureError(f"the function cannot be a JAX function: {error.what}", where=_line(error), hint=error.hint) from None
    except RuntimeError as error:
        if "does not support input mutations" not in str(error):
            raise
        raise CaptureError(
            "the function writes to a parameter, and a JAX function cannot do that", hint="write to a buffer, or return the new value"
        ) from None


class _Writes(LostWrites):
    """A dispatch mode that also refuses writes to tensors from outside the function, before they happen.

    It also refuses parameters from outside within control flow, where torch itself fails.
    """

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.nn.Parameter) and not isinstance(leaf, (FunctionalTensor, FakeTensor)):
                    raise _read_from_elsewhere(leaf, _here())
        return super().__torch_dispatch__(func, types, args, kwargs)

    def check(self, func: OpOverload, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, (FunctionalTensor, FakeTensor)):
            raise LostWrite(
                f"it writes with {func} to a tensor that is not among its arguments",
                hint="pass it as an argument, and return its new value; or give to_jax the module that owns it as a buffer",
            )
        super().check(func, tensor)


class _Lines(TorchFunctionMode):
    """Records for each node the user's line that created it, where errors and `user_line` find it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # TorchDynamo captures control flow; it would trace this mode, too, and records lines itself.
        if not torch.compiler.is_dynamo_compiling() and (frame := _user_frame()) is not None:
            code = frame.f_code
            torch.fx.traceback.set_stack_trace([f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n    \n'])
        return func(*args, **(kwargs or {}))


def _user_frame() -> FrameType | None:
    """Returns the innermost frame of the user's own code that is running."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _here() -> str:
    frame = _user_frame()
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _is_library(path: str) -> bool:
    return any(f"/{package}/" in path for package in ("torch", "dynaxla", "jax")) or path.startswith("<")


def _line(error: BaseException, inner: Sequence[traceback.FrameSummary] = ()) -> str:
    """Returns the innermost line of the user's own code in a traceback. `inner`: frames that were traced, not run."""
    frames = [*traceback.extract_tb(error.__traceback__), *inner]
    own = [frame for frame in frames if not _is_library(frame.filename) and not frame.filename.endswith("contextlib.py")]
    return f"{own[-1].filename}:{own[-1].lineno}, in {own[-1].name}" if own else ""
