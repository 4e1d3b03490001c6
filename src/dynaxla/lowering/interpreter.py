"""The interpreter: walks an ATen graph under jax tracing, and calls the lowering of each node.

For an op without a lowering, the traced program calls torch's own kernel (fallback.py).
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import torch
from torch._prims.rng_prims import run_and_save_rng_state
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import DynaxlaError, LoweringError, UnsupportedOp
from ..observe import coverage, events
from ..torch_ops import aten
from . import dtypes, fallback, kernel_refusals
from .asynchronous import is_collective
from .context import Context
from .cpu import faster_kernels
from .cpu.materialize import in_memory
from .cpu.shared_values import shared_values
from .eager import PORTABLE
from .graphs import FOR_CHECKS, describe_inputs, line_scope, user_line
from .keyed_random import draw_keyed, keyed, operands, random_key, single_op_graph
from .metadata import TensorSpec
from .ops.control_flow import CONTROL_FLOW, Subgraph
from .promotion import casting_as
from .registry import Registry, Rule
from .registry import registry as default_registry
from .symbolic_numbers import FUNCTIONS
from .tpu.refusals import marked
from .tpu.uncompilable_ops import is_uncompilable, uncompilable

with_effects = torch.ops.higher_order.with_effects

# Targets of nodes that call another op, with the position of that op among the node's arguments.
_OP_POSITIONS: dict[Any, int] = {with_effects: 1, keyed: 0}


@dataclass(frozen=True)
class _Step:
    """A node with its lowering and the lowering's arguments.

    Attributes:
        node: The FX node.
        function: The lowering; None if torch's kernel computes the node.
        args, kwargs: The lowering's arguments, with nodes in place of their values.
        takes_context: True if the lowering takes the context.
        is_checked: True if the result's shapes and dtypes are compared with those of the fake tensors.
        fallback_reason: The reason why torch's kernel computes the node.
        is_refused: True if torch's kernel will raise. The kernel must run even if nothing uses its result.
        has_runtime_numbers: True if the op takes numbers that are known only when the graph is called; see `_runtime_numbers`.
    """

    node: Node
    function: Callable[..., Any] | None
    args: list[Any]
    kwargs: dict[str, Any]
    takes_context: bool = False
    is_checked: bool = False
    fallback_reason: str = ""
    is_refused: bool = False
    has_runtime_numbers: bool = False

    @property
    def has_effects(self) -> bool:
        return self.is_refused or _has_effects(self.node)


_CONVOLUTIONS = (aten.convolution.default, aten.convolution_backward.default)


class Interpreter:
    """A graph with the lowerings of its ops, and the lowerings' bound arguments. One interpreter serves all shapes of the inputs.

    Attributes:
        module: The graph.
        platform: JAX's name of the platform, or PORTABLE (see eager.py).
        kernels: True if torch's kernels may compute ops.
        is_lowered: As in `__init__`.
        placeholders, output_node: The graph's inputs and output.
        draws_random: True if the graph, or a graph that it calls, draws random numbers.
        has_bfloat16: True if a node returns a bfloat16 tensor.

    Raises:
        UnsupportedOp: Ops have no lowering, and torch's kernels are not allowed, or not available on the platform. The error names the
            ops.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        platform: str,
        registry: Registry = default_registry,
        *,
        kernels: bool = True,
        is_lowered: bool = False,
    ) -> None:
        """Looks up the lowerings of the graph's ops.

        Args:
            kernels: If True, torch's kernel computes an op without a lowering; otherwise the op is refused.
            is_lowered: True if each op is known to have a lowering. Then the lookup is deferred until the graph is evaluated.
        """
        self.module = module
        self.is_lowered = is_lowered
        self._registry = registry
        self.platform = platform
        self.kernels = kernels and platform in fallback.PLATFORMS
        self.placeholders = module.graph.find_nodes(op="placeholder")
        self.output_node: Node = module.graph.output_node()
        self.draws_random = any(draws_random(node) for graph in (module, *inner_graphs(module)) for node in graph.graph.nodes)
        self._has_convolutions = any(node.target in _CONVOLUTIONS for node in module.graph.nodes)
        self.has_bfloat16 = any(torch.bfloat16 in _dtypes(node) for node in module.graph.nodes)
        self._materialized = shared_values(module.graph, platform)
        # Never read. The list keeps alive the objects that the graph refers to by name.
        self._kept_alive = [kept for node in module.graph.nodes if (kept := registry.kept_alive(node)) is not None]
        if not is_lowered:
            _ = self._steps

    def reorders(self, inputs: Iterable[TensorSpec]) -> bool:
        """True if arrays of the program may have another memory order than row-major.

        On the CPU, passes/jaxpr/transposes.py processes such a program.
        """
        return self._has_convolutions or not all(spec.is_row_major for spec in inputs)

    @functools.cached_property
    def _steps(self) -> list[_Step]:
        steps: list[_Step] = []
        missing: list[Node] = []
        for node in self.module.graph.nodes:
            if node.op == "get_attr":
                steps.append(_constant_step(self.module, node))
            elif node.op == "call_function":
                rule = find_rule(node, self.platform, self._registry)
                if node.target in CONTROL_FLOW:
                    steps.append(self._control_flow_step(node, self._registry))
                elif rule is not None and (refusal := kernel_refusals.refusal_of_node(node)):
                    steps.append(self._refused_step(node, refusal))
                elif node.target is keyed:
                    steps.append(self._keyed_step(node, self._registry))
                elif rule is not None or is_plain_python(node):
                    step = _step(node, rule, self.kernels)
                    steps.append(_refused_on_tpu(step) if self.platform == PORTABLE and is_uncompilable(node, "tpu") else step)
                elif self.kernels:
                    steps.append(_Step(node, None, list(node.args), dict(node.kwargs), fallback_reason="it has no lowering"))
                else:
                    missing.append(node)
        if missing:
            raise _unsupported(missing)
        return steps

    @functools.cached_property
    def _effectful(self) -> set[Node]:
        """The nodes that have an effect besides returning their results.

        If each op is known to have a lowering, the nodes are found without looking up the lowerings.
        """
        if not self.is_lowered:
            return {step.node for step in self._steps if step.has_effects}
        called = [node for node in self.module.graph.nodes if node.op == "call_function"]
        return {
            node for node in called if _has_effects(node) or (node.target not in CONTROL_FLOW and kernel_refusals.refusal_of_node(node))
        }

    @property
    def has_effects(self) -> bool:
        """True if the graph has checks, or ops that are called for their effect."""
        return bool(self._effectful)

    def run(self, inputs: Sequence[Any], ctx: Context, wanted: Sequence[Node]) -> list[Any]:
        """Evaluates the graph.

        Args:
            inputs: One array or int per placeholder.
            wanted: The nodes whose values to return.

        Raises:
            LoweringError: A lowering fails, or disagrees with PyTorch about a shape or dtype.
            UnsupportedOp: An op cannot be lowered for these inputs.
        """
        with casting_as(ctx.eager):
            return self._run(inputs, ctx, wanted)

    def _run(self, inputs: Sequence[Any], ctx: Context, wanted: Sequence[Node]) -> list[Any]:
        values: dict[Node, Any] = dict(zip(self.placeholders, inputs, strict=True))
        ctx.values = values
        needed, has_listeners = self.needed(wanted), events.has_listeners()
        for step in self._steps:
            if step.node not in needed:
                continue
            ctx.node = step.node
            if step.node in ctx.fused_results:
                coverage.count_lowered(str(step.node.target))
                value = ctx.fused_results[step.node]
                if value is None:
                    continue
            elif ctx.replicated is None and not has_listeners:
                value = self._evaluate(step, values, ctx)
            else:
                with line_scope(step.node, on_mesh=ctx.replicated is not None):
                    value = self._evaluate(step, values, ctx)
            if step.is_checked:
                _check(step.node, value, ctx.output)
            if step.node in self._materialized:
                value = in_memory(value)
            values[step.node] = value
        return [values[node] for node in wanted]

    def count_lowered(self, wanted: Sequence[Node]) -> None:
        """Counts the ops of a graph as lowered, as `run` does. Only for graphs in which torch's kernels compute no op."""
        for node in self.needed(wanted):
            if isinstance(node.target, torch._ops.OpOverload):
                coverage.count_lowered(str(node.target))

    def needed(self, wanted: Sequence[Node]) -> set[Node]:
        """Returns the nodes to evaluate: the wanted nodes, the nodes with effects, and all nodes from which these are computed.

        Nodes that only the graph's output uses, such as views of inputs, are not evaluated unless they are wanted.
        """
        needed = set(wanted)
        for node in reversed(self.module.graph.nodes):
            if node.op in ("call_function", "get_attr") and (node in needed or node in self._effectful):
                needed.add(node)
                needed.update(node.all_input_nodes)
        return needed

    def _control_flow_step(self, node: Node, registry: Registry) -> _Step:
        """Returns the step of a control-flow op, with an interpreter for each graph that the op calls.

        Torch's kernel computes the op if a size in one of the graphs depends on the values of a tensor.
        """
        args: list[Any] = list(node.args)
        for position, graph in _graph_arguments(node).items():
            if any(free_unbacked_symbols(inner.meta.get("val")) for inner in graph.graph.nodes):
                message = f"{node.target} with a size or number that depends on the values of a tensor"
                if not self.kernels:
                    raise _with_location(UnsupportedOp(message, op=str(node.target)), node)
                return _Step(node, None, list(node.args), dict(node.kwargs), fallback_reason=message)
            interpreter = Interpreter(graph, self.platform, registry, kernels=self.kernels)
            args[position] = Subgraph(interpreter.run_all, interpreter.draws_random)
        return _Step(node, CONTROL_FLOW[node.target], args, dict(node.kwargs), takes_context=True, is_checked=True)

    def _refused_step(self, node: Node, refusal: str) -> _Step:
        """Returns a step in which the program calls torch's kernel, which then raises as in eager mode."""
        message = f"torch's kernel refuses it: {refusal}"
        if not self.kernels:
            raise _with_location(UnsupportedOp(message, op=str(node.target)), node)
        return _Step(node, None, list(node.args), dict(node.kwargs), fallback_reason=message, is_refused=True)

    def _keyed_step(self, node: Node, registry: Registry) -> _Step:
        """Returns the step of a `keyed` node.

        Torch's kernel cannot replace the lowering of the op: the kernel would draw from torch's generator.
        """
        interpreter = Interpreter(single_op_graph(node), self.platform, registry, kernels=False)
        graph = Subgraph(interpreter.run_all, True)
        return _Step(node, functools.partial(draw_keyed, graph), [node.args[1], operands(node)], {}, takes_context=True, is_checked=True)

    def run_all(self, inputs: Sequence[Any], ctx: Context) -> list[Any]:
        """Evaluates the graph and returns all outputs. Constants among the outputs are returned unchanged."""
        outputs = self.output_node.args[0]
        outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        values = iter(self.run(inputs, ctx, [output for output in outputs if isinstance(output, Node)]))
        return [next(values) if isinstance(output, Node) else output for output in outputs]

    def _evaluate(self, step: _Step, values: dict[Node, Any], ctx: Context) -> Any:
        """Returns a node's value, from its lowering or, if the lowering cannot compute it, from torch's kernel."""
        node = step.node
        if step.function is None:
            return _fall_back(node, values, ctx, step.fallback_reason, step.is_refused)
        args = [_substitute(arg, values) for arg in step.args]
        kwargs = {name: _substitute(arg, values) for name, arg in step.kwargs.items()}
        if step.takes_context:
            kwargs["ctx"] = ctx
        if step.has_runtime_numbers and (refusal := _refusal_of_numbers(node, values)):
            message = f"torch's kernel refuses it: {refusal}"
            if not self.kernels:
                raise _with_location(UnsupportedOp(message, op=str(node.target)), node)
            return _fall_back(node, values, ctx, message, must_run=True)
        problem = faster_kernels.kernel_call(node, ctx) if self.kernels else None
        try:
            if problem is None:
                value = step.function(*args, **kwargs)
            else:
                implementation = ctx.choose(faster_kernels.KERNEL, problem)
                value = implementation.run(
                    problem, lambda: _call_kernel(node, values, ctx, use_out_variant=True), lambda: step.function(*args, **kwargs)
                )
        except UnsupportedOp as error:
            if not self.kernels or not fallback.reads_values_only(node.target):
                raise _with_location(error, node) from None
            return _fall_back(node, values, ctx, error.message)
        except (DynaxlaError, jax.errors.UnexpectedTracerError):  # UnexpectedTracerError: a value outlived its trace
            raise
        except Exception as error:
            if self.kernels and (refusal := _refusal_of(node, values)):
                return _fall_back(node, values, ctx, f"torch's kernel refuses it: {refusal}", must_run=True)
            raise LoweringError(
                f"the lowering of {node.target} failed: {type(error).__name__}: {error}",
                op=str(node.target),
                inputs=describe_inputs(node),
                where=user_line(node),
                hint="fix the lowering if it is yours; otherwise please report this with the lines above",
            ) from error
        if isinstance(node.target, torch._ops.OpOverload) or node.target in CONTROL_FLOW:
            coverage.count_lowered(str(node.target))
        return value


def _dtypes(node: Node) -> set[torch.dtype]:
    """Returns the dtypes of the tensors that a node returns."""
    value = node.meta.get("val")
    return {item.dtype for item in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(item, torch.Tensor)}


def _refusal_of(node: Node, values: dict[Node, Any]) -> str:
    """Returns the message with which torch's kernel refuses a node's arguments, with the shapes of this trace; "" if it accepts them."""
    with _disable_current_modes():
        return kernel_refusals.refusal_after_failure(node.target, *_zero_arguments(node, values))


def _refusal_of_numbers(node: Node, values: dict[Node, Any]) -> str:
    """Returns the message with which torch's kernel refuses a node's numbers in this trace, such as 300 for an int8.

    Returns "" if the kernel accepts them.
    """
    name, numbers = node.target._schema.name.removeprefix("aten::"), [values[item] for item in _runtime_numbers(node)]
    if not kernel_refusals.may_refuse_numbers(name, numbers, {dtype for item in (node, *node.all_input_nodes) for dtype in _dtypes(item)}):
        return ""
    with _disable_current_modes():
        return kernel_refusals.refusal_of_numbers(node.target, *_zero_arguments(node, values))


def _zero_arguments(node: Node, values: dict[Node, Any]) -> list[Any]:
    """Returns a node's args and kwargs in this trace, with tensors of zeros in place of arrays."""

    def zeros(value: Any) -> Any:
        return torch.zeros((), dtype=dtypes.to_torch(value.dtype)).expand(value.shape) if isinstance(value, jax.Array) else value

    return [pytree.tree_map(zeros, _substitute(arguments, values)) for arguments in (node.args, node.kwargs)]


def _runtime_numbers(node: Node) -> list[Node]:
    """Returns the nodes whose values an op takes as numbers (not as sizes), and whose values are known only when the graph is called.

    Returns an empty list for ops of decompositions: the user's program did not call their kernels. The exception is the `full` into which
    constant_pad_nd is decomposed, since constant_pad_nd's kernel refuses the same numbers as that of `full`.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    called_op = str(node.meta.get("original_aten") or node.target)
    if called_op not in (str(node.target), "aten.constant_pad_nd.default"):
        return []
    schema = {argument.name: argument for argument in node.target._schema.arguments}
    bound = [*zip(schema.values(), node.args, strict=False), *((schema[name], value) for name, value in node.kwargs.items())]
    return [
        value
        for argument, value in bound
        if isinstance(value, Node)
        and isinstance(value.meta.get("val"), (torch.SymInt, torch.SymFloat))
        and str(argument.real_type).removeprefix("Optional[").startswith(("number", "float"))
    ]


def _fall_back(node: Node, values: dict[Node, Any], ctx: Context, reason: str, must_run: bool = False) -> Any:
    """Returns a node's value from torch's kernel, and counts the op as a fallback with this reason."""
    coverage.count_fallback(str(node.target), reason, user_line(node))
    return _call_kernel(node, values, ctx, must_run)


def _call_kernel(node: Node, values: dict[Node, Any], ctx: Context, must_run: bool = False, use_out_variant: bool = False) -> Any:
    args = [_substitute(arg, values) for arg in node.args]
    kwargs = {name: _substitute(arg, values) for name, arg in node.kwargs.items()}
    return fallback.call_kernel(ctx, args, kwargs, must_run, use_out_variant)


def find_rule(node: Node, platform: str, registry: Registry = default_registry) -> Rule | None:
    """Returns the lowering of a node's op; None if there is none, or if XLA cannot compile it for the platform."""
    if is_uncompilable(node, platform):
        return None
    op = node.args[_OP_POSITIONS[node.target]] if node.target in _OP_POSITIONS else node.target
    return registry.find(op, platform) if isinstance(op, torch._ops.OpOverload) else None


def needs_kernel(node: Node, platform: str) -> bool:
    """True if only torch's kernel can compute a node, and programs on the platform cannot call the kernel."""
    if platform in fallback.PLATFORMS or node.target in CONTROL_FLOW or node.target is keyed or is_plain_python(node):
        return False
    rule = find_rule(node, platform)
    if rule is None or kernel_refusals.refusal_of_node(node):
        return True
    try:
        rule.bind(node.args[2:] if node.target is with_effects else node.args, node.kwargs)
    except UnsupportedOp:
        return True
    return False


def _has_effects(node: Node) -> bool:
    """True if a node has an effect besides returning its result."""
    if node.target is with_effects or node.target is aten._functional_assert_async.msg or FOR_CHECKS in node.meta:
        return True
    return is_collective(node) or (isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.returns)


def _graph_arguments(node: Node) -> dict[int, GraphModule]:
    """Returns the graphs that a control-flow op calls, by their positions among its arguments."""
    graphs = {}
    for position, arg in enumerate(node.args):
        if isinstance(arg, Node) and arg.op == "get_attr" and arg.graph.owning_module is not None:
            value = constant_value(arg.graph.owning_module, arg)
            if isinstance(value, GraphModule):
                graphs[position] = value
    return graphs


def inner_graphs(module: GraphModule) -> list[GraphModule]:
    """Returns the graphs that a graph's control-flow ops call, recursively."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function" and node.target in CONTROL_FLOW]
    graphs = [graph for node in nodes for graph in _graph_arguments(node).values()]
    return [found for graph in graphs for found in (graph, *inner_graphs(graph))]


def draws_random(node: Node) -> bool:
    """True if the node draws random numbers from torch's generator.

    Attention ops have the tag `nondeterministic_seeded` even without dropout. Without dropout they must not advance the generator.
    """
    if node.target is random_key or node.target is run_and_save_rng_state:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    for index, argument in enumerate(node.target._schema.arguments):
        if argument.name == "dropout_p":
            probability = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name, argument.default_value)
            return probability != 0
    return True


def is_plain_python(node: Node) -> bool:
    """True for a node that is evaluated by calling its target: arithmetic on sizes, and getitem on the results of an op."""
    return (
        getattr(node.target, "__module__", None) in ("_operator", "math", "builtins", "torch", "torch.utils._sympy.functions")
        and not isinstance(node.target, torch._ops.OpOverload)
        and (node.target is operator.getitem or not isinstance(node.meta.get("val"), torch.Tensor))
    )


def _step(node: Node, rule: Rule | None, kernels: bool) -> _Step:
    """Returns the step of a node with a lowering, or of a node of plain Python (`rule` is None). `kernels`: as in `Interpreter`."""
    if rule is None:
        assert callable(node.target)
        function = FUNCTIONS.get(node.target, node.target)
        if function in (operator.add, operator.mul) and len(node.args) > 2:
            # PyTorch writes sums and products of several sizes as one node, but Python's operators take two operands.
            function = functools.partial(_reduce, function)
        return _Step(node, function, list(node.args), dict(node.kwargs))
    has_token = node.target is with_effects
    try:
        args, kwargs = rule.bind(node.args[2:] if has_token else node.args, node.kwargs)
    except UnsupportedOp as error:
        if not kernels:
            raise _with_location(error, node) from None
        return _Step(node, None, list(node.args), dict(node.kwargs), fallback_reason=error.message)
    if has_token:
        return _Step(node, _with_token(rule.function), [node.args[0], *args], kwargs, rule.takes_context)
    return _Step(
        node,
        rule.function,
        args,
        kwargs,
        rule.takes_context,
        bool(rule.op._schema.returns),
        has_runtime_numbers=bool(_runtime_numbers(node)),
    )


def _reduce(function: Callable[[Any, Any], Any], *args: Any) -> Any:
    return functools.reduce(function, args)


def _refused_on_tpu(step: _Step) -> _Step:
    """Returns a step whose program raises UnsupportedOp if JAX lowers it for a TPU."""
    function, refusal = step.function, uncompilable(step.node, "tpu")
    assert function is not None

    def mark(leaf: Any) -> Any:
        return marked(leaf, refusal) if isinstance(leaf, jax.Array) else leaf

    def with_marks(*args: Any, **kwargs: Any) -> Any:
        return function(*[mark(arg) for arg in args], **{name: mark(arg) for name, arg in kwargs.items()})

    return dataclasses.replace(step, function=with_marks)


def _with_token(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a lowering so that its first argument and first result are AOTAutograd's token, which orders ops with effects."""

    def with_token(token: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        result = function(*args, **kwargs)
        return (token, *result) if isinstance(result, (tuple, list)) else (token, result)

    return with_token


def _with_location(error: UnsupportedOp, node: Node) -> UnsupportedOp:
    """Returns the error with the node's inputs and its line in the user's code."""
    return UnsupportedOp(error.message, op=error.op, inputs=describe_inputs(node), where=user_line(node), hint=error.hint)


def constant_value(module: GraphModule, node: Node) -> Any:
    """Returns the object that a get_attr node names."""
    value: Any = module
    for name in str(node.target).split("."):
        value = getattr(value, name)
    return value


def _constant_step(module: GraphModule, node: Node) -> _Step:
    """Returns the step of a constant. A tensor becomes an array; the graph of a control-flow op stays unchanged."""
    value = constant_value(module, node)
    if not isinstance(value, torch.Tensor):
        return _Step(node, lambda: value, [], {})
    constant = to_numpy(value)
    return _Step(node, lambda: jax.numpy.asarray(constant), [], {})


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Copies a tensor to a NumPy array of the counterpart of its dtype."""
    with _disable_current_modes():
        # A copy has no conjugate or negative bit, and its last stride is 1 even if it has one element.
        tensor = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        target = dtypes.to_jax(tensor.dtype)
        if tensor.numel() == 0:
            return np.zeros(tuple(tensor.shape), target)
        flat = tensor.reshape(-1).view(torch.uint8).numpy().view(target)
        return flat.reshape(tuple(tensor.shape))


def _substitute(arg: Any, values: dict[Node, Any]) -> Any:
    """Returns an argument with values in place of nodes."""
    if isinstance(arg, Node):
        return values[arg]
    if isinstance(arg, (list, tuple)):
        return [_substitute(item, values) for item in arg]
    if isinstance(arg, dict):
        return {key: _substitute(item, values) for key, item in arg.items()}
    return arg


def _check(node: Node, value: Any, expected: Any) -> None:
    """Checks that the results of a lowering have the shapes and dtypes that PyTorch expects.

    Raises:
        LoweringError: A result has another shape or dtype.
    """
    if isinstance(expected, TensorSpec):
        if isinstance(value, jax.Array) and value.shape == expected.shape and value.dtype == expected.jax_dtype:
            return
        found = f"{value.dtype}{list(value.shape)}" if isinstance(value, jax.Array) else repr(value)
        raise LoweringError(
            f"the lowering of {node.target} returned {found}, and PyTorch returns {expected.jax_dtype}{list(expected.shape)}",
            op=str(node.target),
            inputs=describe_inputs(node),
            where=user_line(node),
            hint="fix the lowering if it is yours; otherwise please report this with the lines above",
        )
    if isinstance(expected, tuple):
        for item, item_expected in zip(value, expected, strict=True):
            if item_expected is not None and item is not None:
                _check(node, item, item_expected)


# By op: a hint in place of the general one.
_HINTS = {
    "while_loop_stack_output": "call while_loop under torch.no_grad(), or use torch's scan: the gradient of a while_loop needs the "
    "values of all its steps, and their number is not known when the program is compiled"
}


def _unsupported(missing: list[Node]) -> UnsupportedOp:
    """Returns the error for nodes whose ops have no lowering. It describes the first node, and names the ops of the others."""
    first = missing[0]
    others = sorted({str(node.target) for node in missing[1:]} - {str(first.target)})
    hint = _HINTS.get(
        str(first.target),
        "register one with dynaxla.lowers, write this part with other ops, or keep it out of torch.compile (torch.compiler.disable)",
    )
    if others:
        hint += f" (also without a lowering in this graph: {', '.join(others)})"
    return UnsupportedOp(
        f"no lowering for {first.target}",
        op=str(first.target),
        inputs=describe_inputs(first),
        where=user_line(first),
        hint=hint,
    )
