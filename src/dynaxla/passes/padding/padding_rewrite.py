"""The rewrite of a graph for rounded sizes: the extents of its values, and methods that add nodes, most of which read true sizes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ...lowering.ops.valid_size_ops import check_index, masked, repeat_last, roll_or_flip, size_product, slice_at, write_into_zeros
from ...torch_ops import aten
from .valid_sizes import Extent, Extents, NoPaddingRule, is_nondecreasing, size_of, sizes_of, symbols_in, symbols_of


class PaddingRewrite:
    """A graph that is being rewritten for rounded sizes.

    The rewritten graph has one more input, a vector of true sizes. The methods that add nodes insert the new nodes in front of `node`.

    Args:
        module: the graph, which is changed.
        rounded: the rounded symbols.
        device: the device of the true sizes.

    Attributes:
        graph: the graph.
        node: the node whose rule is being applied.
        rounded: the rounded symbols.
        extents: for each node, the Extents of its tensor, or a list of Extents if the op returns several tensors. A value that is no tensor
            has no entry, or ().
        true_sizes: the placeholder for the vector of true sizes (int64).
        true_size_expressions: the expression of each element of `true_sizes`.
        replaced_views: the ids of storages of which a view has become a computed value, because a rule has replaced the view's op.
        original_inputs: the original fake tensor of each input that is padded.
    """

    def __init__(self, module: GraphModule, rounded: Collection[Any], device: torch.device) -> None:
        self.graph = module.graph
        self.rounded = frozenset(rounded)
        self.extents: dict[Node, Any] = {}
        self.true_size_expressions: list[Any] = []
        self.replaced_views: set[int] = set()
        self.original_inputs: dict[Node, torch.Tensor] = {}
        self.node: Node
        placeholders = self.graph.find_nodes(op="placeholder")
        self._mode = next(value.fake_mode for node in placeholders if isinstance(value := node.meta["val"], torch._subclasses.FakeTensor))
        with self.graph.inserting_after(placeholders[-1]):
            self.true_sizes = self.graph.placeholder("true_sizes")
        self.true_sizes.meta["val"] = self.fake((1,), torch.int64, device)
        self._masked: dict[tuple[Node, int, tuple[Any, ...], Any], Node] = {}

    def fake(self, shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Returns a contiguous fake tensor."""
        with self._mode:
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def finish(self) -> None:
        """Sets the length of `true_sizes`, once all true sizes that the graph reads are known."""
        self.true_sizes.meta["val"] = self.fake((len(self.true_size_expressions),), torch.int64, self.true_sizes.meta["val"].device)

    # Queries

    def extents_of(self, node: Any) -> Extents:
        """Returns the extents of a tensor; () for a number, which broadcasts to any tensor."""
        found = self.extents.get(node) if isinstance(node, Node) else None
        return found if found is not None else ()

    def is_padded(self, extent: Extent) -> bool:
        """True if a factor of a dimension is rounded, so that the dimension has padding."""
        return any(not self.rounded.isdisjoint(symbols_in(factor)) for factor in extent.factors)

    def is_rounded(self, value: Any) -> bool:
        """True if a size, or another number of the graph, depends on a rounded symbol."""
        value = value.meta.get("val") if isinstance(value, Node) else value
        return not self.rounded.isdisjoint(symbols_of(value)) if not isinstance(value, torch.Tensor) else False

    def involves_rounded_sizes(self, node: Node) -> bool:
        """True if an operand or result of a node has a rounded size, or is a number that depends on a rounded size."""
        leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
        values = pytree.tree_leaves(node.meta.get("val"))
        sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
        return (
            any(isinstance(leaf, Node) and self._has_padding(leaf) for leaf in leaves)
            or any(map(self.is_rounded, leaves))
            or any(map(self.is_rounded, sizes))
        )

    def _has_padding(self, node: Node) -> bool:
        found = self.extents.get(node)
        several = found if isinstance(found, list) else [found or ()]
        return any(self.is_padded(extent) for extents in several for extent in extents or ())

    def prefixes(self, tensor: torch.Tensor, uniform: bool = False) -> Extents:
        """Returns the extents of a tensor whose valid positions, in each dimension, are one prefix of the dimension's true size.

        uniform: True if the tensor has the same values along each rounded dimension.
        Raises: NoPaddingRule if a true size may be greater than the rounded size.
        """
        if free_unbacked_symbols(tensor):
            raise NoPaddingRule("its size depends on the values of a tensor")
        found = tuple(Extent.of(size) for size in sizes_of(tensor))
        for extent in found:
            if not all(map(is_nondecreasing, extent.factors)):
                raise NoPaddingRule(f"the size {extent.factors[0]} may be larger than its rounded value")
        return tuple(Extent(extent.factors, uniform and self.is_padded(extent)) for extent in found)

    def require_exact(self, *values: Any) -> None:
        """Raises NoPaddingRule if a number depends on a rounded size."""
        for value in pytree.tree_leaves(values):
            if self.is_rounded(value):
                raise NoPaddingRule("it uses a dynamic size as a number")

    def require_constant(self, *values: Any) -> None:
        """Raises NoPaddingRule if a number may change between calls."""
        for value in pytree.tree_leaves(values):
            if isinstance(value, (Node, torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise NoPaddingRule("it uses a number that changes between calls")

    def require_unpadded(self, node: Node, dims: Iterable[int]) -> None:
        """Raises NoPaddingRule if one of these dimensions has a rounded size."""
        for dim in dims:
            if self.is_padded(self.extents_of(node)[dim]):
                raise NoPaddingRule(f"dimension {dim} of {_shape(node)} is padded")

    # New nodes

    def true_size_index(self, size: Any) -> int:
        """Returns the index of a true size in `true_sizes`. Adds the size if `true_sizes` does not have it.

        Raises: NoPaddingRule if the true size may be greater than the rounded size.
        """
        if not is_nondecreasing(size):
            raise NoPaddingRule(f"the position {size} may be larger than its rounded value")
        if size not in self.true_size_expressions:
            self.true_size_expressions.append(size)
        return self.true_size_expressions.index(size)

    def add(self, op: Callable[..., Any], args: tuple[Any, ...], shape: Sequence[Any], like: torch.Tensor, **kwargs: Any) -> Node:
        """Adds the call of an op.

        Args:
            op: the op.
            args: the op's positional arguments.
            shape: the result's shape.
            like: a tensor with the result's device and, unless `result_dtype` is passed, its dtype.
            kwargs: the op's keyword arguments, and `result_dtype`: the result's dtype.
        """
        dtype = kwargs.pop("result_dtype", like.dtype)
        with self.graph.inserting_before(self.node):
            node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = self.fake(shape, dtype, like.device)
        node.meta["stack_trace"] = self.node.meta.get("stack_trace")
        return node

    def duplicate(self, node: Node) -> list[Node]:
        """Adds a copy of a node with several results, and returns its results."""
        with self.graph.inserting_before(self.node):
            copy = self.graph.call_function(node.target, node.args, dict(node.kwargs))
            results = [self.graph.call_function(operator.getitem, (copy, index)) for index in range(len(node.meta["val"]))]
        for added, val in zip([copy, *results], [node.meta["val"], *node.meta["val"]], strict=True):
            added.meta = {**node.meta, "val": val}
        return results

    def rounded_size(self, tensor: Node, dim: int) -> Any:
        """Returns the size of a dimension in the rewritten graph, as an int or an added node."""
        size = tensor.meta["val"].shape[dim]
        if isinstance(size, int):
            return size
        with self.graph.inserting_before(self.node):
            node = self.graph.call_function(aten.sym_size.int, (tensor, dim))
        node.meta["val"] = size
        return node

    def masked(self, node: Node, dims: Iterable[int], fill: Any, extents: Extents | None = None) -> Node:
        """Returns the tensor with `fill` at all positions that are padding in one of these dimensions.

        extents: the extents to use; None for the tensor's own. The caller passes extents for a tensor without its own extent in these
            dimensions, such as a uniform tensor.
        """
        extents = extents if extents is not None else self.extents_of(node)
        for dim in dims:
            extent = extents[dim].non_uniform
            if not self.is_padded(extent):
                continue
            key = node, dim, extent.factors, repr(fill)  # as a text, because 0.0 equals -0.0
            if key not in self._masked:
                size_indices = [self.true_size_index(factor) if self.is_padded(Extent.of(factor)) else -1 for factor in extent.factors]
                sizes = [self._rounded_factor(node, dim, factor, len(extent.factors)) for factor in extent.factors]
                value = node.meta["val"]
                added = self.add(masked, (node, self.true_sizes, dim, sizes, size_indices, fill), value.shape, value)
                self.extents[added] = tuple(own.non_uniform if d == dim else own for d, own in enumerate(self.extents_of(node)))
                self._masked[key] = added
            node = self._masked[key]
        return node

    def _rounded_factor(self, node: Node, dim: int, factor: Any, count: int) -> Any:
        """Returns the rounded value of a factor of a dimension, as an int or a node. count: the number of the dimension's factors."""
        if isinstance(factor, int):
            return factor
        if count == 1:
            return self.rounded_size(node, dim)
        for earlier in self.graph.nodes:
            if earlier is self.node:
                break
            value = earlier.meta.get("val")
            if isinstance(value, torch.SymInt) and size_of(value) == factor:
                return earlier
            if isinstance(value, torch.Tensor) and factor in sizes_of(value):
                return self.rounded_size(earlier, sizes_of(value).index(factor))
        raise NoPaddingRule(f"no tensor has a dimension of size {factor}")

    def slice_from(self, node: Node, dim: int, start: Any, shape: Sequence[Any]) -> Node:
        """Adds a slice of a tensor along a dimension.

        Args:
            node: the tensor.
            dim: the dimension.
            start: the true start, as an expression or an int.
            shape: the shape of the slice.
        """
        index_and_start = (-1, start) if isinstance(start, int) else (self.true_size_index(start),)
        return self.add(slice_at, (node, self.true_sizes, dim, *index_and_start), shape, node.meta["val"])

    def embedded_in_zeros(self, node: Node, dim: int, start: Any, shape: Sequence[Any]) -> Node:
        """Adds a tensor of zeros into which `node` is written along a dimension.

        Args:
            node: the tensor to write.
            dim: the dimension.
            start: the first position to write, as an expression.
            shape: the shape of the result.
        """
        return self.add(write_into_zeros, (node, self.true_sizes, dim, self.true_size_index(start)), shape, node.meta["val"])

    def rolled_or_flipped(self, node: Node, dim: int, shift: int, *, backwards: bool = False) -> Node:
        """Rolls the valid positions of a dimension, which are one prefix, by `shift`, or reverses their order (`backwards`)."""
        value = node.meta["val"]
        added = self.add(
            roll_or_flip,
            (node, self.true_sizes, dim, self.true_size_index(size_of(value.shape[dim])), shift, backwards),
            value.shape,
            value,
        )
        self.extents[added] = self.extents_of(node)
        return added

    def edge_filled(self, node: Node, dims: Iterable[int]) -> Node:
        """Fills the padding of dimensions with copies of the last valid element, as in NumPy's padding mode "edge".

        Raises: NoPaddingRule for a flattened dimension (several factors).
        """
        for dim in dims:
            extent = self.extents_of(node)[dim].non_uniform
            if not self.is_padded(extent):
                continue
            if len(extent.factors) > 1:
                raise NoPaddingRule("it reads the last element of a flattened dimension")
            value = node.meta["val"]
            added = self.add(repeat_last, (node, self.true_sizes, dim, self.true_size_index(extent.factors[0])), value.shape, value)
            self.extents[added] = self.extents_of(node)
            node = added
        return node

    def checked_index(self, index: Node, size: Any, dim: int, *, from_end: bool, is_index: bool, ignored: int | None = None) -> Node:
        """Adds a check of indices against the true size of a dimension. Returns the indices as int64.

        Args:
            index: the indices.
            size: the true size.
            dim: the dimension that an error names.
            from_end: True if negative indices count from the true end.
            is_index: True if an index out of range raises IndexError, else RuntimeError.
            ignored: an index that is not checked; None for none.
        """
        value = index.meta["val"]
        arguments = index, self.true_sizes, dim, self.true_size_index(size), from_end, is_index, ignored
        added = self.add(check_index, arguments, value.shape, value, result_dtype=torch.int64)
        self.extents[added] = self.extents_of(index)
        return added

    def true_float(self, number: Any, like: torch.Tensor) -> Node:
        """Returns the true value of a number computed from sizes, such as a quotient, as a float64 tensor of rank 0.

        Raises: NoPaddingRule.
        """

        def add_float(op: Any, *parts: Node) -> Node:
            return self.add(op, parts, (), like, result_dtype=torch.float64)

        if isinstance(number, (int, float)) or number.is_number:
            return self.add(
                aten.full.default, ([], float(number)), (), like, dtype=torch.float64, device=like.device, result_dtype=torch.float64
            )
        function_name = type(number).__name__
        if function_name == "ToFloat" or (function_name not in _FLOAT_OPS and number.is_integer):
            integer = number.args[0] if function_name == "ToFloat" else number
            return add_float(torch.ops.prims.convert_element_type.default, self.true_product([integer], like), torch.float64)
        if function_name not in _FLOAT_OPS:
            raise NoPaddingRule(f"the number {number} cannot be computed from the sizes")
        return functools.reduce(
            functools.partial(add_float, _FLOAT_OPS[function_name]), [self.true_float(part, like) for part in number.args]
        )

    def true_product(self, sizes: Sequence[Any], like: torch.Tensor) -> Node:
        """Returns the product of true sizes as an int64 tensor of rank 0."""
        constant_factor, size_indices = 1, []
        for size in sizes:
            if isinstance(size, int):
                constant_factor *= size
            else:
                size_indices.append(self.true_size_index(size))
        return self.add(size_product, (self.true_sizes, size_indices, constant_factor), (), like, result_dtype=torch.int64)


# The ops that `true_float` uses for the functions of sympy and torch in expressions.
_FLOAT_OPS = {
    "Add": aten.add.Tensor,
    "Mul": aten.mul.Tensor,
    "IntTrueDiv": aten.div.Tensor,
    "FloatTrueDiv": aten.div.Tensor,
}


def _shape(node: Node) -> str:
    return str(list(node.meta["val"].shape))
