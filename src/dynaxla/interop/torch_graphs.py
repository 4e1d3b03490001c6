"""Captures a torch function, for operands of given shapes, as a function for JAX programs. Its derivative comes from torch's autograd."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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

from .. import user_frames
from ..buffers.lost_writes import LostWrite, LostWrites
from ..capture.decompositions import decompositions
from ..errors import CaptureError, DynaxlaError
from ..guards.state_changes import version_of
from ..lowering import dtypes
from ..lowering.eager import PORTABLE
from ..lowering.function import Function, Results
from ..lowering.graphs import user_line
from ..lowering.interpreter import constant_value, draws_random
from ..passes.joint.partition import partition
from ..runtime import capture_lock
from ..torch_ops import aten
from ..user_frames import location_of
from .effect_tokens import remove_tokens_of_checks, token_count
from .wide_calls import Derivative, WideCall, axes_of, narrowed, varying

Tensors = Sequence[torch.Tensor]

_COPY_OPS = (aten.clone.default, aten.detach.default, aten.alias.default)


@dataclass(frozen=True)
class GraphOperand:
    """The metadata of a tensor that a torch function takes.

    Attributes:
        shape: The shape.
        dtype: Torch's dtype.
        requires_grad: True if the tensor requires a gradient.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False


class TorchCall(WideCall):
    """A torch function of tensors with given shapes and dtypes, callable from JAX.

    Args:
        function: Takes tensors and returns new tensors; it mutates none of its arguments.
        operands: The metadata of the tensors that the function takes.
        device: The device of the fake tensors with which the function is traced.
        narrow: True if JAX's 64-bit types are off in the surrounding JAX program, so that its arrays have at most 32 bits per number.
        is_unchanged: Returns True if the state that the function reads besides its operands has certainly not changed since the trace.

    Attributes:
        draws_random: True if the call takes a key, as uint32[2], before its operands.
        drawing_line: The user's line that draws the first random number; "" if there is none.
        copied_operands: For each result that is an unchanged copy of an operand, the operand's index; None for other results.

    Raises:
        CaptureError: The function cannot be captured, for example because its control flow depends on a tensor's values.
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
        self._constants = [(tensor, version_of(tensor)) for tensor in _constants(graph)]
        self.draws_random = program.draws_random
        self.drawing_line = next((user_line(node) for node in _nodes(graph) if draws_random(node)), "")
        placeholders, results = graph.graph.find_nodes(op="placeholder"), graph.graph.output_node().args[0]
        self._results = [node.meta["val"].dtype for node in results]
        self.copied_operands = [placeholders.index(source) if (source := _copy_source(node)) in placeholders else None for node in results]

        def run(*arrays: Array) -> list[Array]:
            outputs = self._outputs(program, arrays)
            return [self._narrow_array(output) for output in outputs]

        super().__init__(run)

    def is_current(self) -> bool:
        """True if nobody has written to the tensors that are constants of the graph."""
        return all(version_of(tensor) == version for tensor, version in self._constants)

    def _check_unchanged(self) -> None:
        """Checks, before the derivative is traced, that a new trace of the function would give the same graph and constants.

        Raises:
            CaptureError: The graph or a constant differs.
        """
        if self.is_current():
            if self._is_unchanged():
                return
            new_graph = self._graph([False] * len(self._operands))
            pairs = zip(_constants(new_graph), self._constants, strict=False)
            if _code(new_graph) == self._code and all(new is old or _equal(new, old) for new, (old, _) in pairs):
                return
        raise CaptureError(
            "a value that a torch function reads has changed since JAX traced the function, so its derivative would be wrong",
            hint="call jax.jit again after the change, or pass the changing value as an argument",
        )

    def derivative(self, wanted: tuple[bool, ...]) -> Derivative:
        return self._cached(("derivative", wanted), lambda: self._autograd_derivative(wanted))

    @_disable_current_modes()
    def _autograd_derivative(self, wanted: tuple[bool, ...]) -> Derivative:
        """Returns the derivative that autograd computes: AOTAutograd's joint graph, partitioned into a forward and a backward graph.

        Args:
            wanted: See `WideCall.derivative`.
        """
        self._check_unchanged()
        mask = list(wanted[1:] if self.draws_random else wanted)
        differentiable_results: list[int] = []
        with capture_lock.capturing():
            joint = self._graph(mask, differentiable_results)
            if not differentiable_results:
                return self._zero_derivative(mask)
            forward_graph, backward_graph = _partitioned(joint, len(self._results))
            forward, backward = Function.portable(forward_graph), Function.portable(backward_graph)
        # For each input of the backward graph: None for a cotangent, else the index of the forward graph's output that is the residual.
        names = [node.name for node in backward_graph.graph.find_nodes(op="placeholder")]
        results = [getattr(node, "name", None) for node in forward_graph.graph.output_node().args[0]]
        residual_sources = [None if name.startswith("tangents") else results.index(name) for name in names]
        residual_indices = [index for index in residual_sources if index is not None]
        gradients = backward_graph.graph.output_node().args[0]
        result_dtypes = [dtypes.to_jax(self._results[index]) for index in differentiable_results]

        def run(*operands: Array) -> list[Array]:
            outputs = self._outputs(forward, operands)
            residuals = [outputs[index] for index in residual_indices]
            residuals = [*map(_split_64_bit, residuals)] if self._narrow else residuals
            return [*map(self._narrow_array, outputs[: len(self._results)]), *residuals, *operands]

        def pull_back(*operands: Array) -> list[Array]:
            """Takes residuals, operands and cotangents of results; returns the cotangents of wanted operands, by the backward graph."""
            residuals = iter(operands[: len(residual_indices)])
            cotangents = (lax.convert_element_type(item, dtype) for item, dtype in zip(operands[num_fixed:], result_dtypes, strict=True))
            # torch's gradients of complex numbers are the conjugates of JAX's cotangents.
            values = [jnp.conj(next(cotangents)) if index is None else next(residuals) for index in residual_sources]
            values = [_join_64_bit(value, spec.jax_dtype) for value, spec in zip(values, backward.specs.values(), strict=True)]
            outputs = iter(backward(values).outputs)
            all_gradients = [None if gradient is None else next(outputs) for gradient in gradients[: len(mask)]]
            wanted_gradients = [(grad, item) for grad, item, want in zip(all_gradients, self._operands, mask, strict=True) if want]
            return [_zeros(item) if grad is None else jnp.conj(grad) for grad, item in wanted_gradients]

        shapes = [forward_graph.graph.output_node().args[0][index].meta["val"].shape for index in differentiable_results]
        cotangent_dtypes = [narrowed(dtype) if self._narrow else dtype for dtype in result_dtypes]
        cotangents = [jax.ShapeDtypeStruct(tuple(shape), dtype) for shape, dtype in zip(shapes, cotangent_dtypes, strict=True)]
        num_fixed = len(residual_indices) + len(wanted)

        def differentiable_run(*operands: Array) -> list[Array]:
            return [*self(operands), *map(lax.stop_gradient, run(*operands)[len(self._results) : -len(operands)]), *operands]

        def differentiable_linear() -> WideCall:
            pull_back = self._differentiable_pull_back(mask, differentiable_results, shapes, len(residual_indices))
            return WideCall(_transposed(pull_back, num_fixed, cotangents), pull_back)

        return Derivative(
            WideCall(run, differentiable=lambda: WideCall(differentiable_run)),
            WideCall(_transposed(pull_back, num_fixed, cotangents), pull_back, differentiable_linear),
            differentiable_results,
        )

    def _differentiable_pull_back(
        self, mask: Sequence[bool], differentiable_results: Sequence[int], shapes: Sequence[torch.Size], num_residuals: int
    ) -> Callable[..., list[Array]]:
        """Returns a function that takes residuals, operands and cotangents of results, and returns the cotangents of wanted operands.

        Unlike the backward graph, it has derivatives with respect to the operands: autograd computes the gradients from the operands alone,
        with `create_graph=True`. The residuals are not read.

        Args:
            mask: For each operand, True if its gradient is wanted.
            differentiable_results: The indices of the differentiable results.
            shapes: The shapes of the differentiable results.
            num_residuals: The number of residuals.
        """

        with _disable_current_modes():
            self._check_unchanged()  # the state may have changed since the first derivative was traced

        def gradients(tensors: Tensors) -> Tensors:
            operands = [
                tensor.detach().requires_grad_() if want and not tensor.requires_grad else tensor
                for tensor, want in zip(tensors, mask, strict=False)
            ]
            results = self._function(operands)
            gradients = torch.autograd.grad(
                [results[index] for index in differentiable_results],
                [operand for operand, want in zip(operands, mask, strict=True) if want],
                tensors[len(mask) :],
                create_graph=True,
                materialize_grads=True,
            )
            return [gradient.clone() for gradient in gradients]

        specs = [GraphOperand(tuple(shape), self._results[index]) for index, shape in zip(differentiable_results, shapes, strict=True)]
        call = TorchCall(gradients, [*self._operands, *specs], self._device, self._narrow, self._is_unchanged)
        first = num_residuals + (
            self.draws_random and not call.draws_random
        )  # without the key, if only the results depend on random numbers
        num_fixed = num_residuals + self.draws_random + len(mask)

        def pull_back(*operands: Array) -> list[Array]:
            cotangents = [jnp.conj(cotangent) for cotangent in operands[num_fixed:]]
            return [jnp.conj(gradient) for gradient in call([*operands[first:num_fixed], *cotangents])]

        return pull_back

    def _zero_derivative(self, mask: Sequence[bool]) -> Derivative:
        """Returns the derivative of a call whose results do not depend differentiably on any wanted operand: zeros."""

        def nothing(*_: Array) -> list[Array]:
            return []

        def zeros(*_: Array) -> list[Array]:
            return [_zeros(item) for item, want in zip(self._operands, mask, strict=True) if want]

        # The operands are residuals, because a batched derivative takes the size of the batch from them.
        return Derivative(WideCall(lambda *operands: [*self(operands), *operands]), WideCall(nothing, zeros), ())

    def _outputs(self, program: Function, operands: Sequence[Array]) -> list[Array]:
        """Runs a program on the call's operands, which are converted to the program's dtypes. The results keep the program's dtypes."""
        key = None
        if self.draws_random:
            key, operands = jax.random.wrap_key_data(operands[0], impl="threefry2x32"), operands[1:]
        arrays = [lax.convert_element_type(array, spec.jax_dtype) for array, spec in zip(operands, program.specs.values(), strict=True)]
        results = program(arrays, key if program.draws_random else None)
        return _outputs_or_nan(results)

    def _narrow_array(self, array: Array) -> Array:
        return lax.convert_element_type(array, narrowed(array.dtype) if self._narrow else array.dtype)

    def _graph(self, wanted: Sequence[bool], differentiable_results: list[int] | None = None) -> GraphModule:
        """Returns the function's graph, or a joint graph with gradients if the gradient of an operand is wanted.

        The caller must have turned off dispatch modes. Such modes belong to the user, or to a torch trace inside which this code runs.

        Args:
            wanted: For each operand, True if its gradient is wanted.
            differentiable_results: Receives the indices of the results that have a gradient.
        """
        joint = any(wanted)
        shape_env = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
        with FakeTensorMode(allow_non_fake_inputs=True, shape_env=shape_env):
            inputs = [torch.empty(item.shape, dtype=item.dtype, device=self._device) for item in self._operands]
        for tensor, want in zip(inputs, wanted, strict=True):
            tensor.requires_grad_(want)

        def function(*tensors: torch.Tensor) -> list[torch.Tensor]:
            if joint:
                results = self._function(tensors)
                if differentiable_results is not None:
                    differentiable_results[:] = [index for index, result in enumerate(results) if result.requires_grad]
                return list(results)
            # Gradients are on as in the joint graph, because the function may read `torch.is_grad_enabled()` or `requires_grad`.
            with torch.enable_grad():
                inputs_with_grad = [
                    tensor.detach().requires_grad_() if item.requires_grad else tensor
                    for tensor, item in zip(tensors, self._operands, strict=True)
                ]
                return [result.detach() for result in self._function(inputs_with_grad)]

        with (
            capture_lock.capturing(), torch.inference_mode(False), torch.set_grad_enabled(joint), _capture_errors(),
            torch.fx.traceback.preserve_node_meta(), _RecordLines(), _RefuseWrites(),
            # TorchDynamo captures the branches of torch.cond and the like. Without this setting it would turn a Python float that changed
            # since the last trace into an extra input of the branch, for which there is no value here.
            torch._dynamo.config.patch(specialize_float=True),
        ):  # fmt: skip
            graph: Any = aot_export_joint_simple(function, tuple(inputs), trace_joint=joint, decompositions=decompositions(PORTABLE))
        if not joint:  # the partitioner needs the tokens of a joint graph
            remove_tokens_of_checks(graph.graph)
        _check_constants(graph)
        return graph


def _partitioned(joint: GraphModule, num_results: int) -> tuple[GraphModule, GraphModule]:
    """Splits a joint graph into a forward and a backward graph, without tokens of checks.

    Args:
        joint: The joint graph, which is changed.
        num_results: The number of results of the function.
    """
    inputs = [node.meta["val"] for node in joint.graph.find_nodes(op="placeholder")]
    forward, backward = partition(joint, inputs, platform=PORTABLE, num_fwd_outputs=token_count(joint.graph) + num_results)
    for graph in (forward, backward):
        remove_tokens_of_checks(graph.graph)
    return forward, backward


def _copy_source(node: Node) -> Node:
    """Returns the node that a node copies, through any number of copies; a node that is no copy is returned itself."""
    while node.target in _COPY_OPS:
        node = node.args[0]
    return node


def _transposed(
    pull_back: Callable[..., list[Array]], residual_count: int, cotangents: Sequence[jax.ShapeDtypeStruct]
) -> Callable[..., list[Array]]:
    """Returns the transpose of `pull_back`: a function that takes residuals and tangents of operands, and returns tangents of results.

    Args:
        pull_back: Takes residuals and cotangents of results, and returns the cotangents of operands. It is linear in the cotangents.
        residual_count: The number of residuals.
        cotangents: Shapes and dtypes of the cotangents of results.
    """

    def push_forward(*operands: Array) -> list[Array]:
        residuals, tangents = operands[:residual_count], operands[residual_count:]
        point, axes = [_nonzero_numbers(item) for item in cotangents], axes_of(operands)
        # pull_back is the transpose of the forward derivative. It is linear, so jax.vjp can transpose it back at any point where no
        # lowering treats a number as a zero: x + 0.0, for example, is `0.0 if x == 0 else x`.
        transposed = jax.vjp(lambda *values: varying(pull_back(*residuals, *values), axes), *varying(point, axes))[1]
        return list(transposed(list(tangents)))

    return push_forward


def _nonzero_numbers(item: jax.ShapeDtypeStruct) -> Array:
    """Returns an array of numbers from 1 to 2 that are so different that sums of their multiples are not zero by chance."""
    position = lax.iota(np.float32, math.prod(item.shape))
    numbers = 1 + lax.rem(lax.mul(position, np.float32(0.618034)), np.float32(1))
    return lax.convert_element_type(lax.reshape(numbers, item.shape), item.dtype)


def _zeros(operand: GraphOperand) -> Array:
    return lax.full(operand.shape, 0, dtypes.to_jax(operand.dtype))


def _split_64_bit(array: Array) -> Array:
    """Splits 64-bit numbers into two 32-bit halves, which 32-bit JAX can hold without loss. Other arrays stay as they are."""
    if array.dtype.itemsize < 8 or array.dtype == np.complex64:
        return array
    if dtypes.is_complex(array.dtype):
        return jnp.stack([_split_64_bit(lax.real(array)), _split_64_bit(lax.imag(array))])
    return lax.bitcast_convert_type(array, np.dtype(np.uint32))


def _join_64_bit(array: Array, dtype: dtypes.DType) -> Array:
    """Reverts `_split_64_bit` for an array that had this dtype."""
    if array.dtype == dtype:
        return array
    if dtypes.is_complex(dtype):
        half = dtypes.real(dtype)
        return lax.complex(_join_64_bit(array[0], half), _join_64_bit(array[1], half))
    return lax.bitcast_convert_type(array, dtype)


def _outputs_or_nan(results: Results) -> list[Array]:
    """Returns the outputs of a program. If one of eager mode's checks fails (such as an index out of range), inexact outputs are NaN."""
    outputs = list(results.outputs)
    if not results.checks:
        return outputs
    holds = results.checks[0].condition
    for check in results.checks[1:]:
        holds = lax.bitwise_and(holds, check.condition)
    return [jnp.where(holds, output, jnp.full_like(output, np.nan)) if dtypes.is_inexact(output.dtype) else output for output in outputs]


def _graphs(graph: GraphModule) -> list[GraphModule]:
    """Returns the graph, and the graphs of branches and loop bodies in it."""
    return [module for module in graph.modules() if isinstance(module, GraphModule)]


def _nodes(graph: GraphModule) -> Iterator[Node]:
    """Returns the nodes of a graph, and of branches and loop bodies in it."""
    return (node for part in _graphs(graph) for node in part.graph.nodes)


def _constants(graph: GraphModule) -> list[torch.Tensor]:
    """Returns the tensors that are constants of a graph, or of branches and loop bodies in it."""
    values = [constant_value(part, node) for part in _graphs(graph) for node in part.graph.find_nodes(op="get_attr")]
    return [value for value in values if isinstance(value, torch.Tensor)]


def _code(graph: GraphModule) -> list[str]:
    return [part.code for part in _graphs(graph)]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a, b)


def _check_constants(graph: GraphModule) -> None:
    """Checks the tensors that the graph, apart from its branches and loop bodies, has as constants.

    Raises:
        CaptureError: A tensor is left over from an earlier trace, or requires a gradient.
    """
    for node in graph.graph.find_nodes(op="get_attr"):
        constant = constant_value(graph, node)
        if not isinstance(constant, torch.Tensor):
            continue
        location = next((line for user in node.users if (line := user_line(user))), "")
        if isinstance(constant, (FakeTensor, FunctionalTensor)):
            raise CaptureError(
                "the function reads a tensor that an earlier trace has stored, and that has no values",
                where=location,
                hint="do not keep tensors in globals, closures or caches: return them",
            )
        if constant.requires_grad:
            raise _foreign_tensor_error(constant, location)


def _foreign_tensor_error(tensor: torch.Tensor, location: str) -> CaptureError:
    """Returns the error for a tensor that requires a gradient but is not an operand of the function. `location`: the user's line, or ""."""
    kind = "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor with requires_grad"
    return CaptureError(
        f"the function reads a {kind} that is not among its arguments: its value would be a constant, without a gradient",
        where=location,
        hint="give to_jax the module that owns it, or pass it as an argument; if the module cached it, empty the cache",
    )


@contextlib.contextmanager
def _capture_errors() -> Iterator[None]:
    """Converts torch's exceptions about data-dependent code and control flow, and lost writes, to `CaptureError`s with hints."""
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode) as error:
        raise CaptureError(
            "the function's control flow, or a size in it, depends on the values of a tensor "
            f"({getattr(error, 'func', None) or type(error).__name__}): JAX traces a function with shapes, without values",
            where=location_of(error),
            hint="use torch.where or torch.cond, or compute the number before the call and pass it as a Python number",
        ) from None
    except DynaxlaError:
        raise
    except TorchDynamoException as error:
        reason = " ".join(str(error).partition("\n  Hint:")[0].split())
        raise CaptureError(
            f"torch cannot capture a function that is given to torch.cond, while_loop, scan or torch.compile: {reason}",
            where=location_of(error, getattr(error, "real_stack", None) or ()),
            hint="write it so that torch.compile(..., fullgraph=True) accepts it; torch's own error, above this one, has the details",
        ) from error
    except LostWrite as error:
        raise CaptureError(f"the function cannot be a JAX function: {error.reason}", where=location_of(error), hint=error.hint) from None
    except RuntimeError as error:
        if "does not support input mutations" not in str(error):
            raise
        raise CaptureError(
            "the function writes to a parameter, and a JAX function cannot do that", hint="write to a buffer, or return the new value"
        ) from None


class _RefuseWrites(LostWrites):
    """A dispatch mode that raises before a write that the graph would lose, and before a write to a tensor from outside the function.

    It also raises for control flow (torch.cond, scan and others) that uses a parameter from outside the function, since torch itself cannot
    trace that.
    """

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverload):
            for leaf in pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.nn.Parameter) and not isinstance(leaf, (FunctionalTensor, FakeTensor)):
                    raise _foreign_tensor_error(leaf, user_frames.location())
        return super().__torch_dispatch__(func, types, args, kwargs)

    def check(self, func: OpOverload, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, (FunctionalTensor, FakeTensor)):
            raise LostWrite(
                f"it writes with {func} to a tensor that is not among its arguments",
                hint="pass it as an argument, and return its new value; or give to_jax the module that owns it as a buffer",
            )
        super().check(func, tensor)


class _RecordLines(TorchFunctionMode):
    """Records for each node the user's line that created it. Errors and `user_line` read the record."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # TorchDynamo, which captures control flow, would trace this mode too. It records lines itself.
        if not torch.compiler.is_dynamo_compiling() and (frame := user_frames.innermost()) is not None:
            torch.fx.traceback.set_stack_trace(['  File "{}", line {}, in {}\n    \n'.format(*frame)])
        return func(*args, **(kwargs or {}))
