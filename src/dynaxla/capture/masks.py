"""A graph that is being rewritten for rounded sizes: what counts of each of its values, and the nodes that look at true sizes."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from ..lowering.ops.masking import last_repeated, length, masked, part, put, turned, within
from ..torch_ops import aten
from .extents import Extent, Extents, Unknown, grows, size_of, sizes_of, symbols_in, symbols_of


class Masks:
    """Nodes are added before `node`, the one whose rule is being applied.

    module: the graph, which is changed. rounded: the symbols that are rounded. device: of the true sizes.
    Attributes: extents (of each node's value: Extents of a tensor, a list of these where an op gives several; None where it is no tensor);
    lengths (the input with the true sizes); sizes (which these are); moved (storages of which views have become values of their own:
    where they begin depends on a true size).
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
        """All true sizes that are looked at are known."""
        self.lengths.meta["val"] = self.fake((len(self.sizes),), torch.int64, self.lengths.meta["val"].device)

    # What is known

    def of(self, node: Any) -> Extents:
        """What counts of a tensor; of a number, which goes with any tensor, nothing is said."""
        found = self.extents.get(node) if isinstance(node, Node) else None
        return found if found is not None else ()

    def is_padded(self, extent: Extent) -> bool:
        return any(not self.rounded.isdisjoint(symbols_in(factor)) for factor in extent.factors)

    def padded_dims(self, node: Node) -> list[int]:
        return [dim for dim, extent in enumerate(self.of(node)) if self.is_padded(extent)]

    def is_rounded(self, value: Any) -> bool:
        """Whether a size, or another number of the graph, depends on a rounded symbol."""
        value = value.meta.get("val") if isinstance(value, Node) else value
        return not self.rounded.isdisjoint(symbols_of(value)) if not isinstance(value, torch.Tensor) else False

    def is_concerned(self, node: Node) -> bool:
        """Whether a node reads, or makes, anything of a rounded size."""
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
        """A tensor whose dimensions count up to their true sizes. Raises: Unknown if these may be greater than the rounded ones."""
        if free_unbacked_symbols(tensor):
            raise Unknown("its size depends on values")
        found = tuple(Extent.of(size, False) for size in sizes_of(tensor))
        for extent in found:
            if not all(map(grows, extent.factors)):
                raise Unknown(f"a size of {extent.factors[0]}")
        return tuple(Extent(extent.factors, uniform and self.is_padded(extent)) for extent in found)

    def exact(self, *values: Any) -> None:
        """Numbers that must not depend on rounded sizes. Raises: Unknown."""
        for value in pytree.tree_leaves(values):
            if self.is_rounded(value):
                raise Unknown("a size used as a number")

    def fixed(self, *values: Any) -> None:
        """Numbers that must be the same in all calls. Raises: Unknown."""
        for value in pytree.tree_leaves(values):
            if isinstance(value, (Node, torch.SymInt, torch.SymFloat, torch.SymBool)):
                raise Unknown("a number that changes between calls")

    def unpadded(self, node: Node, dims: Iterable[int]) -> None:
        """Raises: Unknown if one of these dimensions is of a rounded size."""
        for dim in dims:
            if self.is_padded(self.of(node)[dim]):
                raise Unknown(f"dimension {dim} of {_shape(node)} is of a rounded size")

    # What is added

    def place(self, size: Any) -> int:
        """Where a true size stands among the lengths. Raises: Unknown if it may be greater than the rounded one."""
        if not grows(size):
            raise Unknown(f"a position of {size}")
        if size not in self.sizes:
            self.sizes.append(size)
        return self.sizes.index(size)

    def add(self, op: Callable[..., Any], args: tuple[Any, ...], shape: Sequence[Any], like: torch.Tensor, **kwargs: Any) -> Node:
        """A node before the present one. like: gives the device, and the dtype if there is no other."""
        dtype = kwargs.pop("gives", like.dtype)
        with self.graph.inserting_before(self.node):
            node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = self.fake(shape, dtype, like.device)
        node.meta["stack_trace"] = self.node.meta.get("stack_trace")
        return node

    def again(self, node: Node) -> list[Node]:
        """The results of another node with the same op and arguments."""
        with self.graph.inserting_before(self.node):
            copy = self.graph.call_function(node.target, node.args, dict(node.kwargs))
            results = [self.graph.call_function(operator.getitem, (copy, index)) for index in range(len(node.meta["val"]))]
        for added, val in zip([copy, *results], [node.meta["val"], *node.meta["val"]], strict=True):
            added.meta = {**node.meta, "val": val}
        return results

    def number(self, tensor: Node, dim: int) -> Any:
        """The rounded size of a dimension."""
        size = tensor.meta["val"].shape[dim]
        if isinstance(size, int):
            return size
        with self.graph.inserting_before(self.node):
            node = self.graph.call_function(aten.sym_size.int, (tensor, dim))
        node.meta["val"] = size
        return node

    def masked(self, node: Node, dims: Iterable[int], fill: Any, by: Extents | None = None) -> Node:
        """The tensor with `fill` wherever a position in one of these dimensions does not count.

        by: what counts in them, if the tensor itself says nothing of it (as where it is uniform).
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
        raise Unknown(f"a factor of {factor} of a dimension")

    def part(self, node: Node, dim: int, start: Any, shape: Sequence[Any]) -> Node:
        """The tensor from a true position of a dimension on."""
        place = (-1, start) if isinstance(start, int) else (self.place(start),)
        return self.add(part, (node, self.lengths, dim, *place), shape, node.meta["val"])

    def put(self, node: Node, dim: int, start: Any, shape: Sequence[Any]) -> Node:
        """Zeros with the tensor from a true position of a dimension on."""
        return self.add(put, (node, self.lengths, dim, self.place(start)), shape, node.meta["val"])

    def turned(self, node: Node, dim: int, shift: int, *, backwards: bool = False) -> Node:
        """A dimension that is one prefix moved on by `shift` around its true end, or from there to its beginning."""
        value = node.meta["val"]
        added = self.add(turned, (node, self.lengths, dim, self.place(size_of(value.shape[dim])), shift, backwards), value.shape, value)
        self.extents[added] = self.of(node)
        return added

    def held(self, node: Node, dims: Iterable[int]) -> Node:
        """The last elements that count at the positions behind them. Raises: Unknown where a dimension is several in one."""
        for dim in dims:
            extent = self.of(node)[dim].resolved
            if not self.is_padded(extent):
                continue
            if len(extent.factors) > 1:
                raise Unknown("a last element of a dimension that is several in one")
            value = node.meta["val"]
            added = self.add(last_repeated, (node, self.lengths, dim, self.place(extent.factors[0])), value.shape, value)
            self.extents[added] = self.of(node)
            node = added
        return node

    def within(self, index: Node, size: Any, dim: int, *, from_end: bool, is_index: bool, ignored: int | None = None) -> Node:
        """Indices of a dimension of a rounded size. ignored: an index that stays as it is."""
        value = index.meta["val"]
        arguments = index, self.lengths, dim, self.place(size), from_end, is_index, ignored
        added = self.add(within, arguments, value.shape, value, gives=torch.int64)
        self.extents[added] = self.of(index)
        return added

    def real(self, number: Any, like: torch.Tensor) -> Node:
        """A quotient of true sizes, or what else is made of such, as a tensor of float64 without dimensions. Raises: Unknown."""

        def made(op: Any, *parts: Node) -> Node:
            return self.add(op, parts, (), like, gives=torch.float64)

        if isinstance(number, (int, float)) or number.is_number:
            return self.add(aten.full.default, ([], float(number)), (), like, dtype=torch.float64, device=like.device, gives=torch.float64)
        kind = type(number).__name__
        if kind == "ToFloat" or (kind not in _OF_REALS and number.is_integer):
            of = number.args[0] if kind == "ToFloat" else number
            return made(torch.ops.prims.convert_element_type.default, self.product([of], like), torch.float64)
        if kind not in _OF_REALS:
            raise Unknown(f"a number of {number}")
        return functools.reduce(functools.partial(made, _OF_REALS[kind]), [self.real(part, like) for part in number.args])

    def product(self, sizes: Sequence[Any], like: torch.Tensor) -> Node:
        """The product of true sizes, as a tensor without dimensions."""
        times, places = 1, []
        for size in sizes:
            if isinstance(size, int):
                times *= size
            else:
                places.append(self.place(size))
        return self.add(length, (self.lengths, places, times), (), like, gives=torch.int64)


# What numbers are made of, by sympy's and torch's names.
_OF_REALS = {
    "Add": aten.add.Tensor,
    "Mul": aten.mul.Tensor,
    "IntTrueDiv": aten.div.Tensor,
    "FloatTrueDiv": aten.div.Tensor,
}


def _shape(node: Node) -> str:
    return str(list(node.meta["val"].shape))
