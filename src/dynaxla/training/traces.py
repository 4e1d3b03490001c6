"""What lazy steps have recorded: a tree of ATen ops, and the programs that end at its nodes.

A part of a step is a path from the root. Each edge is an op with its arguments: numbers as they are, tensors as a *slot* (which storage,
counted in the order in which the part met them) and a *geometry* (where in that storage the tensor lies). So equal paths compute the same
of whatever tensors they are given, and a path can be compared with what a step does without looking at any tensor's identity.
"""

from __future__ import annotations

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..config import Options
from ..errors import DeviceMismatch, UnsupportedOp, UnsupportedTensor
from ..lowering.asynchronous import is_collective
from ..observe import metrics
from ..runtime import capture_lock
from ..torch_ops import aten
from . import scalars
from .fused_steps import fused_step
from .parts import Part

_log = logging.getLogger("dynaxla")

# How many ops may follow the same ops with other sizes or numbers, and how many that write to other places of the same storages; more of
# them are run by torch.
_MOST_VARIANTS, _MOST_PLACES = 16, 2

# (shape, strides, offset, dtype, conjugate bit, negative bit): which elements of a storage a tensor reads, and as what.
Geometry = tuple[torch.Size, tuple[int, ...], int, torch.dtype, bool, bool]


def geometry(tensor: torch.Tensor) -> Geometry:
    """Which elements of its storage a tensor reads, and as what."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.is_conj(), tensor.is_neg()


def extent(place: Geometry) -> tuple[int, int]:
    """The bytes of a storage that lie between a tensor's first element and its last: start, end."""
    shape, stride, offset, dtype, *_ = place
    if 0 in shape:
        return offset * dtype.itemsize, offset * dtype.itemsize
    last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return offset * dtype.itemsize, (last + 1) * dtype.itemsize


@dataclass(frozen=True)
class Ref:
    """A tensor among an op's arguments."""

    slot: int
    geometry: Geometry


@dataclass(frozen=True)
class View:
    """How a tensor came out of another one on the same storage: op(source, *args, **kwargs), or item `index` of what that gives."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    source: Geometry
    index: int | None


@dataclass(frozen=True)
class New:
    """A tensor in a storage of its own that an op gives. nbytes: of the storage."""

    geometry: Geometry
    device: torch.device
    nbytes: int


@dataclass(frozen=True)
class Given:
    """An op's result that is one of its arguments, by its position among the tensors."""

    position: int


@dataclass(eq=False)
class OpNode:
    """An op after those on the way to it. The root has none.

    Attributes: parent; op, args, kwargs (Refs for tensors); result (New, Given, or a constant; or a list of them); made (for each New, in
    order, its slot); views (how the tensors among its arguments came about, as far as that is known); key; numbers (what stands at the
    places of args and kwargs where ATen takes a number, in order); free (which of these are inputs of the programs, because they have
    changed); places (that ops which follow write to, by what else they are); children (by key); alike (children by their key without
    numbers).
    """

    parent: OpNode | None = None
    op: Any = None
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    result: Any = None
    made: list[int] = field(default_factory=list)
    views: Mapping[tuple[int, Geometry], View] = field(default_factory=dict)
    roots: list[tuple[int, Geometry]] = field(default_factory=list)
    numbers: tuple[float, ...] = ()
    free: set[int] = field(default_factory=set)
    children: dict[Any, OpNode] = field(default_factory=dict)
    alike: dict[Any, OpNode] = field(default_factory=dict)
    variants: dict[Any, int] = field(default_factory=dict)
    places: dict[Any, set[frozenset[tuple[int, Geometry]]]] = field(default_factory=dict)
    programs: dict[int, list[tuple[frozenset[int], Part]]] = field(default_factory=dict)
    is_loose: bool = False

    def is_followed_by_too_many(self, op: Any, alike: Any, written: frozenset[tuple[int, Geometry]]) -> bool:
        """Whether another variant of an op, with other sizes or numbers or in another place, is one too many to have a program.

        `losses[count % 1000] = loss` writes to another place at each call. alike: the op's key without numbers. written: its places.
        """
        self.variants[op] = self.variants.get(op, 0) + 1
        seen = self.places.setdefault(_without_offsets(alike, written), set()) if written else set()
        if len(seen) < _MOST_PLACES:
            seen.add(written)
        return written not in seen or self.variants[op] > _MOST_VARIANTS

    def path(self) -> list[OpNode]:
        """The nodes from the first op to this one."""
        found: list[OpNode] = []
        node = self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def program(self, live: Collection[int], version: int) -> Part | None:
        """The compiled path to this node, if there is one that gives at least what these slots hold."""
        wanted = frozenset(live)
        fitting = [entry for entry in self.programs.get(version, ()) if wanted <= entry[0]]
        return min(fitting, key=lambda entry: len(entry[0]))[1] if fitting else None

    def compile(
        self, live: Collection[int], version: int, inputs: Sequence[torch.Tensor], numbers: Sequence[float], options: Options
    ) -> Part:
        """A program for the path to this node.

        live: the slots whose contents it gives; those that were wanted before are given too, since what is still alive depends on when
        Python collects garbage. inputs, numbers: of the first call.
        """
        wanted = frozenset(live).union(*(entry[0] for entry in self.programs.get(version, ())))
        try:
            with capture_lock.one_at_a_time():
                part = _build(self.path(), sorted(wanted), inputs, numbers)
                part.compile(options, [*inputs, *numbers])
        except (UnsupportedOp, UnsupportedTensor, DeviceMismatch) as error:
            if options.fallback == "error":
                raise
            _log.info("a part of a step is run by torch: %s", error)
            metrics.add("interpreted_parts")
            part.interpret()
        self.programs = {version: [(wanted, part)]}
        return part


def _without_offsets(key: Any, places: Collection[tuple[int, Geometry]]) -> Any:
    """A key, of which it is left open where in their storages these places lie."""
    if not isinstance(key, tuple):
        return key
    if key[:2] in places:
        slot, (shape, stride, _, *rest) = key[:2]
        return slot, shape, stride, tuple(rest), key[2:]
    return tuple(_without_offsets(item, places) for item in key)


def _build(path: Sequence[OpNode], live: Sequence[int], inputs: Sequence[torch.Tensor], numbers: Sequence[float]) -> Part:
    """A path as a graph of ATen ops."""
    graph = Graph()
    nodes: dict[tuple[int, Geometry], Node] = {}
    bases: dict[int, tuple[Node, Geometry]] = {}
    roots = [root for step in path for root in step.roots]
    placeholders = []
    for index, root in enumerate(roots):
        placeholders.append(graph.placeholder(f"input_{index}"))
        nodes[root] = placeholders[-1]
        bases.setdefault(root[0], (placeholders[-1], root[1]))
    given = [graph.placeholder(f"number_{index}") for index in range(len(numbers))]
    for node in given:
        scalars.mark_number(node)
    waiting = iter(given)

    def resolve(slot: int, wanted: Geometry, views: Mapping[tuple[int, Geometry], View]) -> Node:
        if (slot, wanted) not in nodes:
            view = views.get((slot, wanted))
            if view is not None:
                source = resolve(slot, view.source, views)
                node = graph.call_function(view.op, (source, *view.args), dict(view.kwargs))
                nodes[slot, wanted] = node if view.index is None else graph.call_function(_getitem, (node, view.index))
            else:
                base, _ = bases[slot]
                shape, stride, offset, *_ = wanted
                nodes[slot, wanted] = graph.call_function(aten.as_strided.default, (base, list(shape), list(stride), offset))
        return nodes[slot, wanted]

    for step in path:
        args, kwargs = _filled(step, functools.partial(_resolved, resolve, step.views), waiting)
        target = fused_step(step.op) or (scalars.rule(step.op) if step.free else step.op)
        node = graph.call_function(target, args, kwargs)
        made = iter(step.made)
        several = isinstance(step.result, list)
        for index, item in enumerate(step.result if several else [step.result]):
            if isinstance(item, New):
                value = graph.call_function(_getitem, (node, index)) if several else node
                slot = next(made)
                bases[slot] = (value, item.geometry)
                nodes[slot, item.geometry] = value
                if is_collective(node):  # other processes call it, too, whether this one needs the result or not
                    graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (value,))
    outputs = [bases[slot][0] for slot in live]
    _annotate(graph, [*inputs, *(torch.zeros((), dtype=torch.float64) for _ in numbers)])
    return Part(graph, [*placeholders, *given], outputs, {}, live)


def _resolved(resolve: Callable[..., Node], views: Mapping[tuple[int, Geometry], View], ref: Ref) -> Node:
    return resolve(ref.slot, ref.geometry, views)


def _filled(step: OpNode, resolve: Callable[[Ref], Node], given: Iterator[Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A step's arguments with nodes for tensors, and for numbers that are inputs."""
    count = 0

    def fill(value: Any, is_number: bool) -> Any:
        nonlocal count
        if isinstance(value, Ref):
            return resolve(value)
        if isinstance(value, (list, tuple)):
            return [fill(item, is_number) for item in value]
        if is_number and is_free_kind(value):
            count += 1
            return next(given) if count - 1 in step.free else value
        return value

    kinds = number_arguments(step.op)
    args = tuple(fill(value, index in kinds) for index, value in enumerate(step.args))
    kwargs = {name: fill(value, name in kinds) for name, value in step.kwargs.items()}
    return args, kwargs


def is_free_kind(value: Any) -> bool:
    """Whether it is a number that could be an input."""
    return type(value) in (int, float)


_numbers_of: dict[Any, frozenset[int | str]] = {}


def number_arguments(op: Any) -> frozenset[int | str]:
    """The positions and names of arguments that are numbers of any kind to ATen, of ops for which such a number can be an input."""
    found = _numbers_of.get(op)
    if found is None:
        names: set[int | str] = {"lr"} if fused_step(op) is not None else set()
        if scalars.rule(op) is not None:
            for position, argument in enumerate(op._schema.arguments):
                if str(argument.type) in ("number", "List[number]", "Optional[number]", "Tensor"):
                    names |= {argument.name} if argument.kwarg_only else {position, argument.name}
        found = _numbers_of[op] = frozenset(names)
    return found


def _annotate(graph: Graph, inputs: Sequence[torch.Tensor]) -> None:
    """Note what each node gives, as a fake tensor: which of them share memory is read off these."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    values: dict[Node, Any] = {}
    examples = iter(inputs)
    with mode, torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                tensor = next(examples)
                values[node] = mode.from_tensor(tensor)
            else:
                args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
            if isinstance(values[node], torch.Tensor):
                node.meta["val"] = values[node]


def _getitem(values: Any, index: int) -> Any:
    return values[index]


class Traces:
    """Everything that one step has recorded. At most `most` ops; then it starts anew. Of programs, eight times as many are kept as a graph
    keeps executables: a step may have several parts."""

    def __init__(self, options: Options, most: int = 200_000) -> None:
        self.options = options
        self.root = OpNode()
        self._most = most
        self._count = 0
        self._compiled: OrderedDict[OpNode, None] = OrderedDict()

    def add(self, node: OpNode) -> None:
        """Count a node that was added."""
        self._count += 1
        metrics.add("recorded_ops")

    def used(self, node: OpNode) -> None:
        """A part has been run that ends here. What has become too much is forgotten."""
        self._compiled[node] = None
        self._compiled.move_to_end(node)
        while len(self._compiled) > 8 * self.options.executables:
            oldest, _ = self._compiled.popitem(last=False)
            oldest.programs.clear()
            metrics.add("evictions")
        if self._count > self._most:
            self.root, self._count = OpNode(), 0
            self._compiled.clear()
