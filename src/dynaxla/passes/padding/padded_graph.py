"""Rewrites a graph with dynamic sizes to run with rounded sizes: its inputs are padded, and its results are cut to their true sizes.

The rewritten graph computes with the rounded sizes. The rules of `padded_rules.py` and the other `padded_*` modules rewrite the graph op by
op, so that the valid elements of each value (`valid_sizes.py`) are the same as with the true sizes.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols

from ...capture.graph import AtenGraph, copy_graph, graph_device
from ...capture.inputs import Sizes
from ...lowering.graphs import is_tensor, storage_of, user_line, view_source
from ...lowering.interpreter import draws_random, is_plain_python
from ...runtime import private
from . import padded_layers, padded_order, padded_statistics, padded_windows, padded_writes
from .padded_rules import find_rule
from .padding_rewrite import PaddingRewrite
from .round_up import Rounding
from .valid_sizes import Extent, Extents, NoPaddingRule, is_nondecreasing, quotient, size_of, sizes_of, symbols_in

_RULES = padded_layers, padded_order, padded_statistics, padded_windows, padded_writes  # imported because they register rules


@dataclass(frozen=True)
class InputOutput:
    """An output that is an input or a view of an input.

    Attributes:
        position: the input's position.
        fake: the fake tensor of the view; None for the input itself.
        source: the fake tensor of the input.
    """

    position: int
    fake: torch.Tensor | None
    source: torch.Tensor


@dataclass(frozen=True)
class ComputedOutput:
    """An output that the program computes.

    Attributes:
        index: the index among the program's outputs.
        extents: the valid positions of the output.
        fake: the output's fake tensor. The values of its symbols in a call are the true sizes.
    """

    index: int
    extents: Extents
    fake: torch.Tensor


@dataclass(frozen=True)
class ViewOutput:
    """An output that is a view of a computed value. Other outputs are views of the same value.

    Attributes:
        base: the computed value.
        fake: the fake tensor of the view.
    """

    base: ComputedOutput
    fake: torch.Tensor


@dataclass(frozen=True)
class NumberOutput:
    """An output that is a number, or None. value: the number or None, or the number's expression."""

    value: Any


@dataclass(frozen=True)
class PaddedGraph:
    """A graph rewritten for rounded sizes.

    Attributes:
        module: the rewritten graph. Its inputs are the original graph's inputs, and then the vector of true sizes.
        true_size_expressions: the expression of each element of the vector of true sizes.
        inputs: the extents of the inputs that are padded, or whose strides depend on rounded sizes, by position.
        numbers: the expressions of the inputs that are sizes, by position.
        outputs: the kinds of the original graph's outputs.
        computed: the original graph's nodes whose values the rewritten graph returns, in the order of its outputs.
        rounding: the rounding of the symbols.
    """

    module: GraphModule
    true_size_expressions: list[Any]
    inputs: dict[int, Extents]
    numbers: dict[int, Any]
    outputs: list[InputOutput | ComputedOutput | ViewOutput | NumberOutput]
    computed: list[Node]
    rounding: Rounding


def pad(graph: AtenGraph) -> PaddedGraph | str | None:
    """Returns the graph for rounded sizes, or the reason why the graph has no such form; None if no size of the graph is symbolic.

    May add guards to the graph's shape environment.
    """
    _guard_encoder_width(graph)
    factorizations: dict[Any, tuple[Any, ...]] = {}
    while True:
        placeholders = graph.module.graph.find_nodes(op="placeholder")
        found = [size for node in placeholders if is_tensor(node) for size in sizes_of(node.meta["val"])]
        rounded = {symbol for size in found for symbol in symbols_in(size)}
        if not rounded:
            return None
        try:
            return _pad(graph, rounded, factorizations)
        except NoPaddingRule as error:
            if error.factorization is not None and error.factorization[0] in found and error.factorization[0] not in factorizations:
                factorizations[error.factorization[0]] = error.factorization[1]
            elif not _guard_equal_sizes(graph, placeholders, error.equal_sizes):
                return str(error)


def _guard_encoder_width(graph: AtenGraph) -> None:
    """Adds guards that the input of a fused transformer layer has the layer's width.

    torch's fake implementation does not require this width. Without the guard, the input's width could be symbolic, and would be rounded.
    """
    for node in graph.module.graph.find_nodes(op="call_function", target=torch.ops.aten._transformer_encoder_layer_fwd.default):
        bool(node.args[0].meta["val"].shape[2] == node.args[1])


def _guard_equal_sizes(graph: AtenGraph, placeholders: Sequence[Node], pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Adds guards that the two sizes of each pair are equal. Returns True if the sizes of all pairs then are equal expressions.

    Adds no guard if the sizes of a pair differ in the traced call. A size that has changed between calls has a symbol of its own in each
    tensor. For example, if scores and labels are flattened, torch only assumes that both have the same number of elements, not that they
    have the same batch and length.
    """
    environment = _shape_environment(placeholders)
    # When a backward graph is compiled, the guards are already fixed.
    if not pairs or graph.phase == "backward" or private.guards_are_suppressed(environment):
        return False
    equalities = []
    for first, second in pairs:
        if first == second:
            continue
        if not symbols_in(first) or not symbols_in(second):
            return False
        equality = sympy.Eq(first, second)
        if not equality.free_symbols:
            return False  # never the same
        same = environment.create_symboolnode(equality)
        if not same.node.has_hint() or not same.node.hint:
            return False
        equalities.append(same)
    return all(map(bool, equalities)) and all(environment.replace(first) == environment.replace(second) for first, second in pairs)


def _shape_environment(placeholders: Sequence[Node]) -> ShapeEnv:
    """Returns the shape environment of the inputs' symbols."""
    return next(size for node in placeholders for size in _symbolic(node.meta["val"])).node.shape_env


def _pad(graph: AtenGraph, rounded: Collection[Any], factorizations: Mapping[Any, tuple[Any, ...]]) -> PaddedGraph:
    """Rewrites a graph, with given factors for some dimensions of its inputs.

    Args:
        graph: the graph, which is not changed.
        rounded: the rounded symbols.
        factorizations: the factors of input dimensions whose valid positions are not one prefix, by the dimension's size. The size alone
            does not determine the factors. For example, a dimension of size 4 * s has the factors (s, 4) if it merges a batch of s with 4
            heads, (4, s) if it merges a batch of 4 with a length s, and the single factor 4 * s if it concatenates 4 tensors of length s.

    Raises: NoPaddingRule.
    """
    module = copy_graph(graph.module)
    placeholders = module.graph.find_nodes(op="placeholder")
    if any(free_unbacked_symbols(node.meta.get("val")) for node in module.graph.nodes):
        raise NoPaddingRule("a size depends on the values of a tensor")
    sources = Sizes(placeholders).sources()
    if not sources.keys() >= set(rounded):
        raise NoPaddingRule("a size occurs only inside an expression of sizes")
    environment = _shape_environment(placeholders)
    originals = dict(zip(module.graph.nodes, graph.module.graph.nodes, strict=True))
    outputs, returned = _outputs(graph, module)
    rewrite = PaddingRewrite(module, rounded, graph_device(module))
    inputs: dict[int, Extents] = {}
    numbers: dict[int, Any] = {}
    symbol_ranks = _symbol_ranks(placeholders, rounded)
    for position, node in enumerate(placeholders):
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor):
            if rewrite.is_rounded(value):
                if not isinstance(value, torch.SymInt):
                    raise NoPaddingRule("an input is a number computed from sizes")
                numbers[position] = size_of(value)
            continue
        extents = tuple(_with_factors(extent, symbol_ranks, factorizations) for extent in rewrite.prefixes(value))
        rewrite.extents[node] = extents
        if any(map(rewrite.is_padded, extents)) or any(map(rewrite.is_rounded, value.stride())):
            inputs[position] = extents
            rewrite.original_inputs[node] = value
            # Padded inputs are row-major, for all strides of the original inputs.
            node.meta["val"] = rewrite.fake(value.shape, value.dtype, value.device)
    for node in list(module.graph.nodes):
        if node.op in ("call_function", "get_attr"):
            _apply(rewrite, node)
        elif node.op not in ("placeholder", "output"):
            raise NoPaddingRule(f"the graph has a node of the unsupported kind {node.op}")
    found, computed = _results(module, rewrite, outputs, returned)
    rewrite.finish()
    module.recompile()
    return PaddedGraph(
        module,
        rewrite.true_size_expressions,
        inputs,
        numbers,
        found,
        [originals[node] for node in computed],
        Rounding(environment, rounded),
    )


def _apply(rewrite: PaddingRewrite, node: Node) -> None:
    """Applies the rule of a node's op, and records the extents of the result. Raises: NoPaddingRule, naming the op."""
    rewrite.node = node
    val = node.meta.get("val")
    several = isinstance(val, (tuple, list))
    if node.op == "get_attr":
        rewrite.extents[node] = rewrite.prefixes(val) if isinstance(val, torch.Tensor) else ()
        return
    if is_plain_python(node):
        source = node.args[0]
        if several or isinstance(val, torch.Tensor):
            found = rewrite.extents[source]
            rewrite.extents[node] = found[node.args[1]] if isinstance(found, list) else found
        return
    if not rewrite.involves_rounded_sizes(node):
        leaves = [item for item in (val if several else [val]) if item is not None]
        if not all(isinstance(item, torch.Tensor) for item in leaves):
            return
        unrounded = [rewrite.prefixes(item) if item is not None else () for item in (val if several else [val])]
        rewrite.extents[node] = unrounded if several else unrounded[0]
        return
    if node.target in _SIZE_OPS:
        return
    if draws_random(node):
        raise NoPaddingRule(f"it draws random numbers ({node.target}, {user_line(node)})")
    rule = find_rule(node.target)
    if rule is None:
        raise NoPaddingRule(f"there is no rule for {node.target} ({user_line(node)})")
    op, before = node.target, node.args
    shared = _shared_storages(node)
    try:
        extents = rule(rewrite, node)
    except NoPaddingRule as error:
        raise NoPaddingRule(f"{op}: {error} ({user_line(node)})", error.factorization, error.equal_sizes) from None
    rewrite.extents[node] = extents
    if (node.target, node.args) != (op, before):
        rewrite.replaced_views |= shared
    for item, own in zip(val, extents, strict=True) if several else [(val, extents)]:
        _check(rewrite, op, item, own)


_SIZE_OPS = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default)


def _shared_storages(node: Node) -> set[int]:
    """Returns the storages of a node's operands that its results share."""
    results = [node, *(user for user in node.users if user.target is operator.getitem)]
    own = {storage_of(result) for result in results if is_tensor(result)}
    return own & {storage_of(read) for read in node.all_input_nodes if is_tensor(read)}


def _check(rewrite: PaddingRewrite, op: Any, fake: Any, extents: Extents) -> None:
    """Raises NoPaddingRule if the extents that a rule returned do not match the result's sizes."""
    if not isinstance(fake, torch.Tensor):
        return
    if len(extents) != fake.dim():
        raise NoPaddingRule(f"{op}: the rule returned the extents of {len(extents)} dimensions, and the result has {fake.dim()}")
    for extent, size in zip(extents, sizes_of(fake), strict=True):
        rest = size
        for factor in extent.factors:
            rest = quotient(rest, factor)
            if rest is None or not is_nondecreasing(factor):
                raise NoPaddingRule(f"{op}: the factor {factor} does not divide the size {size}, or may be larger than its rounded value")
        if rest != 1:
            raise NoPaddingRule(f"{op}: the product of the factors {extent.factors} is not the size {size}")


def _symbolic(value: Any) -> list[torch.SymInt]:
    """Returns the symbolic numbers among a tensor's sizes, strides and storage offset; none for any other value."""
    numbers = [*value.shape, *value.stride(), value.storage_offset()] if isinstance(value, torch.Tensor) else []
    return [number for number in numbers if isinstance(number, torch.SymInt)]


# Inputs


def _symbol_ranks(placeholders: list[Node], rounded: Collection[Any]) -> dict[Any, int]:
    """Returns the position of each rounded symbol in the order in which the symbols first occur as sizes of inputs.

    The factors of a dimension are sorted by this position.
    """
    found: dict[Any, int] = {}
    for node in placeholders:
        sizes = sizes_of(node.meta["val"]) if isinstance(node.meta["val"], torch.Tensor) else ()
        for size in sizes:
            if size in rounded:
                found.setdefault(size, len(found))
    return found


def _with_factors(extent: Extent, symbol_ranks: dict[Any, int], factorizations: Mapping[Any, tuple[Any, ...]]) -> Extent:
    """Returns the extent of an input's dimension, with a size that is a product of symbols split into factors.

    Such products occur if a forward graph passes a flattened dimension to its backward graph. Any order of the factors would be correct,
    but tensors that the graph combines must have the same order.
    """
    (factor,) = extent.factors or (1,)
    if factor in factorizations:
        return Extent(factorizations[factor])
    if isinstance(factor, int) or not factor.is_Mul or not all(item in symbol_ranks for item in factor.args):
        return extent
    return Extent(tuple(sorted(factor.args, key=symbol_ranks.__getitem__)))


# Outputs


def _outputs(graph: AtenGraph, module: GraphModule) -> tuple[list[Any], dict[int, Node]]:
    """Divides the outputs of a graph into computed outputs and all others.

    Args:
        graph: the graph.
        module: a copy of the graph's module. The returned nodes are nodes of this copy.

    Returns: a list of all outputs, with None for each computed output; and a dict from the index of each computed output to the node that
        the program must return. This node is the output's own node or, if several outputs with symbolic sizes share memory and the caller
        can observe this, the node that owns the memory.
    """
    placeholders = module.graph.find_nodes(op="placeholder")
    positions = {node: position for position, node in enumerate(placeholders)}
    owners = {storage_of(node): node for node in reversed(placeholders) if isinstance(node.meta["val"], torch.Tensor)}
    output = module.graph.output_node()
    nodes: list[Any] = list(output.args[0])
    found: list[Any] = []
    returned: dict[int, Node] = {}
    sharing: dict[int, list[int]] = {}
    symbolic: set[int] = set()
    for index, (node, description) in enumerate(zip(nodes, output.meta.get("desc") or [None] * len(nodes), strict=True)):
        val = node.meta.get("val") if isinstance(node, Node) else node
        if not isinstance(val, torch.Tensor):
            if isinstance(val, (torch.SymFloat, torch.SymBool)):
                raise NoPaddingRule("an output is a number that is not a whole number")
            found.append(NumberOutput(size_of(val) if isinstance(val, torch.SymInt) else val))
            continue
        if node in positions:
            found.append(InputOutput(positions[node], None, val))
            continue
        storage = storage_of(node)
        owner = owners.get(storage)
        is_symbolic = bool(_symbolic(val) or (owner is not None and _symbolic(owner.meta["val"])))
        if owner is not None and is_symbolic:
            if graph.phase == "backward" or val.dtype != owner.meta["val"].dtype or val.is_conj() or val.is_neg():
                raise NoPaddingRule("an output shares memory with an input")
            found.append(InputOutput(positions[owner], val, owner.meta["val"]))
            continue
        if val.is_conj() or val.is_neg():
            raise NoPaddingRule("an output has the conjugate or the negative bit")
        if index not in graph.rederived_outputs and "Saved" not in type(description).__name__:
            sharing.setdefault(storage, []).append(index)
            if is_symbolic:
                symbolic.add(storage)
        found.append(None)
        returned[index] = node
    for storage in symbolic:
        if len({nodes[index] for index in sharing[storage]}) > 1:
            returned |= dict.fromkeys(sharing[storage], _common_base([nodes[index] for index in sharing[storage]]))
    return found, returned


def _common_base(nodes: list[Node]) -> Node:
    """Returns the node whose memory the values of all these nodes share. Raises: NoPaddingRule if a value has another dtype."""
    origin = nodes[0]
    while (source := view_source(origin)) is not None:
        origin = source
    if origin.op != "call_function" or any(node.meta["val"].dtype != origin.meta["val"].dtype for node in nodes):
        raise NoPaddingRule("two outputs share memory")
    return origin


def _results(
    module: GraphModule, rewrite: PaddingRewrite, outputs: list[Any], returned: dict[int, Node]
) -> tuple[list[InputOutput | ComputedOutput | ViewOutput | NumberOutput], list[Node]]:
    """Makes a module return only the computed outputs. Returns the kinds of all outputs, and the nodes of the computed outputs.

    outputs, returned: the results of `_outputs`.
    """
    output = module.graph.output_node()
    nodes = list(dict.fromkeys(returned.values()))
    bases: dict[Node, ComputedOutput] = {}
    for index, node in enumerate(nodes):
        extents = tuple(extent.non_uniform for extent in rewrite.extents[node])
        if len(extents) != node.meta["val"].dim():
            raise NoPaddingRule("the valid positions of an output are not known")
        bases[node] = ComputedOutput(index, extents, node.meta["val"])
    found = list(outputs)
    for index, node in returned.items():
        own = output.args[0][index]
        found[index] = bases[node] if own is node else ViewOutput(bases[node], own.meta["val"])
    for node in nodes:
        if storage_of(node) in rewrite.replaced_views:
            fake = node.meta["val"]
            node.meta["val"] = rewrite.fake(fake.shape, fake.dtype, fake.device)
    descriptions = output.meta.get("desc")
    if descriptions is not None:
        output.meta["desc"] = [descriptions[next(index for index, other in returned.items() if other is node)] for node in nodes]
    output.args = (tuple(nodes),)
    return found, nodes
