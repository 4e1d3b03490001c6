"""State of a graph while it is rewritten for rounded sizes: the extents of its values, and helpers that add nodes that read true sizes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ...lowering.ops.masking import check_index, masked, repeat_last, roll_or_flip, size_product, slice_at, write_into_zeros
from ...torch_ops import aten
from .valid_sizes import Extent, Extents, NoPaddingRule, grows, size_of, sizes_of, symbols_in, symbols_of


class Masks:
    """A graph that is being rewritten for rounded sizes.

    The methods add nodes in front of `node`, the node whose rule is being applied.

    Args:
        module: the graph, which is changed.
        rounded: the rounded symbols.
        device: the device of the true sizes.

    Attributes:
        extents: for each node, the Extents of its tensor, or a list of Extents if the op returns several; nothing or () for a value that is
            no tensor.
        lengths: the placeholder for the vector of true sizes (int64).
        sizes: the expression of each element of `lengths`.
        moved: storages with views that the rewriting has replaced by computed values, since they begin at a true size.
        given: the original fake tensor of each input that is padded.
    """

    def __init__(self, module: GraphModule, rounded: Collection[Any], device: torch.device) -> None:
        self.graph = module.graph
        self.rounded = frozenset(rounded)
        self.extents: dict[Node, Any] = {}
        self.sizes: list[Any] = []
        self.moved: set[int] = set()
        self.given: dict[Node, torch.Tensor] = {}
        self.node: Node
        placeholders = self.graph.find_nodes(op="placeholder")
        self._mode = next(value.fake_mode for node in placeholders if isinstance(value := node.meta["val"], torch._subclasses.FakeTensor))
        with self.graph.inserting_after(placeholders[-1]):
            self.lengths = self.graph.placeholder("lengths")
        self.lengths.meta["val"] = self.fake((1,), torch.int64, device)
        self._masked: dict[tuple[Node, int, tuple[Any, ...], Any], Node] = {}

    def fake(self, shape: Sequence[Any], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with self._mode:
            return torch.empty(tuple(shape), dtype=dtype, device=device)

    def done(self) -> None:
        """Sets the length of `lengths`, once all true sizes that the graph reads are known."""
        self.lengths.meta["val"] = self.fake((len(self.sizes),), torch.int64, self.lengths.meta["val"].device)

    # Queries

    def of(self, node: Any) -> Extents:
        """Returns the extents of a tensor; () for a number, which broadcasts to any tensor."""
        found = self.extents.get(node) if isinstance(node, Node) else None
        return found if found is not None else ()

    def is_padded(self, extent: Extent) -> bool:
        return any(not self.rounded.isdisjoint(symbols_in(factor)) for factor in extent.factors)

    def padded_dims(self, node: Node) -> list[int]:
        return [dim for dim, extent in enumerate(self.of(node)) if self.is_padded(extent)]

    def is_rounded(self, value: Any) -> bool:
        """True if a size, or another number of the graph, depends on a rounded symbol."""
        value = value.meta.get("val") if isinstance(value, Node) else value
        return not self.rounded.isdisjoint(symbols_of(value)) if not isinstance(value, torch.Tensor) else False

    def is_concerned(self, node: Node) -> bool:
        """True if an operand or result of a node has a rounded size, or is a number that depends on one."""
        leaves = pytree.tree_leaves((node.args, dict(node.kwargs)))
        values = pytree.tree_leaves(node.meta.get("val"))
        sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
        return (
            any(isinstance(leaf, Node) and self._reads_padding(leaf) for leaf in leaves)
            or any(map(self.is_rounded, leaves))
            or any(map(self.is_rounded, sizes))
        )

    def _reads_padding(self, node: Node) -> bool:
        found = self.extents.get(node)
        several = found if isinstance(found, list) else [found or ()]
        return any(self.is_padded(extent) for extents in several for extent in extents or ())

    def prefixes(self, tensor: torch.Tensor, uniform: bool = False) -> Extents:
        """Returns the extents of a tensor whose dimensions are valid up to their true sizes.

        uniform: True if the tensor has the same values along each rounded dimension.
        Raises: NoPaddingRule if a true size may be greater than the rounded one.
        """
        if free_unbacked_symbols(tensor):
            raise NoPaddingRule("its size depends on the values of a tensor")
        found = tuple(Extent.of(size, False) for size in sizes_of(tensor))
        for extent in found:
            if not all(map(grows, extent.factors)):
                raise NoPaddingRule(f"the size {extent.factors[0]} may be larger than its rounded value")
        return tuple(Extent(extent.factors, uniform and self.is_padded(extent)) for extent in found)

    def exact(self, *values: Any) -> None:
        """Raises NoPaddingRule if a number depends on a rounded size."""
        for value in pytree.tree_leaves(values):
            if self.is_rounded(value):
                raise NoPaddingRule("it uses a dynamic size as a number")

    def fixed(self, *values: Any) -> None:
        """Raises NoPaddingRule if a number may change between calls."""
        for value in pytree.tree_leaves(values):
            if isinstance(value, (Node, torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise NoPaddingRule("it uses a number that changes between calls")

    def unpadded(self, node: Node, dims: Iterable[int]) -> None:
        """Raises NoPaddingRule if one of these dimensions has a rounded size."""
        for dim in dims:
            if self.is_padded(self.of(node)[dim]):
                raise NoPaddingRule(f"dimension {dim} of {_shape(node)} is padded")

    # New nodes

    def place(self, size: Any) -> int:
        """Returns the index of a true size in `lengths`, adding it if needed.

        Raises: NoPaddingRule if it may be greater than the rounded one.
        """
        if not grows(size):
            raise NoPaddingRule(f"the position {size} may be larger than its rounded value")
        if size not in self.sizes:
            self.sizes.append(size)
        return self.sizes.index(size)

    def add(self, op: Callable[..., Any], args: tuple[Any, ...], shape: Sequence[Any], like: torch.Tensor, **kwargs: Any) -> Node:
        """Adds the call of an op in front of the current node.

        Args:
            op: the op.
            args: its positional arguments.
            shape: the result's shape.
            like: a tensor with the result's device and, unless `gives` is passed, its dtype.
            kwargs: the op's keyword arguments, and `gives`: the result's dtype.
        """
        dtype = kwargs.pop("gives", like.dtype)
        with self.graph.inserting_before(self.node):
            node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = self.fake(shape, dtype, like.device)
        node.meta["stack_trace"] = self.node.meta.get("stack_trace")
        return node

    def again(self, node: Node) -> list[Node]:
        """Adds a copy of a node with several results, and returns its results."""
        with self.graph.inserting_before(self.node):
            copy = self.graph.call_function(node.target, node.args, dict(node.kwargs))
            results = [self.graph.call_function(operator.getitem, (copy, index)) for index in range(len(node.meta["val"]))]
        for added, val in zip([copy, *results], [node.meta["val"], *node.meta["val"]], strict=True):
            added.meta = {**node.meta, "val": val}
        return results

    def number(self, tensor: Node, dim: int) -> Any:
        """Returns the rounded size of a dimension, as an int or a node."""
        size = tensor.meta["val"].shape[dim]
        if isinstance(size, int):
            return size
        with self.graph.inserting_before(self.node):
            node = self.graph.call_function(aten.sym_size.int, (tensor, dim))
        node.meta["val"] = size
        return node

    def masked(self, node: Node, dims: Iterable[int], fill: Any, by: Extents | None = None) -> Node:
        """Returns the tensor with `fill` at all positions that are not valid in one of these dimensions.

        by: the extents to use instead of the tensor's own, for a tensor that has none of its own there (as one that is uniform).
        """
        extents = by if by is not None else self.of(node)
        for dim in dims:
            extent = extents[dim].resolved
            if not self.is_padded(extent):
                continue
            key = node, dim, extent.factors, (type(fill), fill)
            if key not in self._masked:
                places = [self.place(factor) if self.is_padded(Extent.of(factor)) else -1 for factor in extent.factors]
                sizes = [self._rounded_size(node, dim, factor, len(extent.factors)) for factor in extent.factors]
                value = node.meta["val"]
                added = self.add(masked, (node, self.lengths, dim, sizes, places, fill), value.shape, value)
                self.extents[added] = tuple(own.resolved if d == dim else own for d, own in enumerate(self.of(node)))
                self._masked[key] = added
            node = self._masked[key]
        return node

    def _rounded_size(self, node: Node, dim: int, factor: Any, count: int) -> Any:
        if isinstance(factor, int):
            return factor
        if count == 1:
            return self.number(node, dim)
        for given in self.graph.nodes:
            if given is self.node:
                break
            value = given.meta.get("val")
            if isinstance(value, torch.SymInt) and size_of(value) == factor:
                return given
            if isinstance(value, torch.Tensor) and factor in sizes_of(value):
                return self.number(given, sizes_of(value).index(factor))
        raise NoPaddingRule(f"no tensor has a dimension of size {factor}")

    def part(self, node: Node, dim: int, start: Any, shape: Sequence[Any]) -> Node:
        """Adds a slice of a tensor that starts at a true position of a dimension. start: an expression or an int. shape: the result's."""
        place = (-1, start) if isinstance(start, int) else (self.place(start),)
        return self.add(slice_at, (node, self.lengths, dim, *place), shape, node.meta["val"])

    def put(self, node: Node, dim: int, start: Any, shape: Sequence[Any]) -> Node:
        """Adds zeros of a shape with the tensor written into them from a true position of a dimension on."""
        return self.add(write_into_zeros, (node, self.lengths, dim, self.place(start)), shape, node.meta["val"])

    def turned(self, node: Node, dim: int, shift: int, *, backwards: bool = False) -> Node:
        """Rolls a dimension that is one prefix by `shift` around its true end, or reverses it (`backwards`)."""
        value = node.meta["val"]
        added = self.add(
            roll_or_flip, (node, self.lengths, dim, self.place(size_of(value.shape[dim])), shift, backwards), value.shape, value
        )
        self.extents[added] = self.of(node)
        return added

    def held(self, node: Node, dims: Iterable[int]) -> Node:
        """Repeats the last valid elements of dimensions over the padding.

        Raises: NoPaddingRule for a flattened dimension (several factors).
        """
        for dim in dims:
            extent = self.of(node)[dim].resolved
            if not self.is_padded(extent):
                continue
            if len(extent.factors) > 1:
                raise NoPaddingRule("it reads the last element of a flattened dimension")
            value = node.meta["val"]
            added = self.add(repeat_last, (node, self.lengths, dim, self.place(extent.factors[0])), value.shape, value)
            self.extents[added] = self.of(node)
            node = added
        return node

    def within(self, index: Node, size: Any, dim: int, *, from_end: bool, is_index: bool, ignored: int | None = None) -> Node:
        """Checks indices of a dimension with a rounded size against its true size.

        Args:
            index: the indices.
            size: the true size.
            dim: the dimension that an error names.
            from_end: True if negative indices count from the true end.
            is_index: True if an index out of range raises IndexError, else RuntimeError.
            ignored: an index that stays as it is.
        """
        value = index.meta["val"]
        arguments = index, self.lengths, dim, self.place(size), from_end, is_index, ignored
        added = self.add(check_index, arguments, value.shape, value, gives=torch.int64)
        self.extents[added] = self.of(index)
        return added

    def real(self, number: Any, like: torch.Tensor) -> Node:
        """Returns the true value of a number computed from sizes, such as a quotient, as a float64 tensor of rank 0.

        Raises: NoPaddingRule.
        """

        def made(op: Any, *parts: Node) -> Node:
            return self.add(op, parts, (), like, gives=torch.float64)

        if isinstance(number, (int, float)) or number.is_number:
            return self.add(aten.full.default, ([], float(number)), (), like, dtype=torch.float64, device=like.device, gives=torch.float64)
        kind = type(number).__name__
        if kind == "ToFloat" or (kind not in _OF_REALS and number.is_integer):
            of = number.args[0] if kind == "ToFloat" else number
            return made(torch.ops.prims.convert_element_type.default, self.product([of], like), torch.float64)
        if kind not in _OF_REALS:
            raise NoPaddingRule(f"the number {number} cannot be computed from the sizes")
        return functools.reduce(functools.partial(made, _OF_REALS[kind]), [self.real(part, like) for part in number.args])

    def product(self, sizes: Sequence[Any], like: torch.Tensor) -> Node:
        """Returns the product of true sizes as an int64 tensor of rank 0."""
        times, places = 1, []
        for size in sizes:
            if isinstance(size, int):
                times *= size
            else:
                places.append(self.place(size))
        return self.add(size_product, (self.lengths, places, times), (), like, gives=torch.int64)


# The ops for sympy's and torch's functions in expressions of such numbers.
_OF_REALS = {
    "Add": aten.add.Tensor,
    "Mul": aten.mul.Tensor,
    "IntTrueDiv": aten.div.Tensor,
    "FloatTrueDiv": aten.div.Tensor,
}


def _shape(node: Node) -> str:
    return str(list(node.meta["val"].shape))
