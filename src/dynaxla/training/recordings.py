"""The recording of one run of a step on fake tensors: a graph, a result, and the changes to Python state.

Results and changes are stored as *templates*. In a template, an `Output`, `ObjectAtPath` or `ComputedNumber` stands for an item that may
differ between calls: an output of the program, an object that each call finds by its path, a number computed from other numbers. After the
program has run, `build` returns the template with the items of the call.
"""

from __future__ import annotations

import functools
import re
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_leaves

from ..errors import CaptureError
from ..guards.dispatch import has_own_dispatch
from ..guards.fingerprints import NO_FINGERPRINT, PLAIN, fingerprint
from ..guards.slots import ABSENT, Place
from ..guards.snapshot import ARGUMENT, ObjectAtPath, Snapshot
from ..lowering.asynchronous import is_collective
from ..runtime.number_tracer import evaluate
from ..runtime.private import storage_id
from .recorder import Recorder
from .traced_numbers import TracedNumber
from .updates import written_nodes


@dataclass(frozen=True)
class Output:
    """Stands for an output of the program.

    Attributes:
        index: the output's position among the program's outputs.
    """

    index: int


@dataclass(frozen=True)
class ComputedNumber:
    """Stands for a number that Python computes from other numbers."""

    number: TracedNumber


_RESULT = "the step's result"  # the place of returned values, in messages


def _key_text(key: Any) -> str:
    """Returns a place's key as text: dtype and shape of a tensor, the `repr` of other keys."""
    return f"{key.dtype}{list(key.shape)}" if isinstance(key, torch.Tensor) else repr(key)


class Recording:
    """The result of recording a function: its graph, its return value, and its changes to Python state.

    Attributes:
        recorder: the recorder, which has the graph.
        outputs: fake tensors that are the program's outputs.
        result: templates of the leaves of the return value.
        spec: the `TreeSpec` of the return value.
        changes: the template of the new value of each changed place (entry of a container, guards/slots.py), by place.
        requires_grad: the new `requires_grad` of each leaf tensor for which the function changes it, by path.
    """

    def __init__(
        self,
        recorder: Recorder,
        result: Any,
        changes: Mapping[Place, Any],
        snapshot: Snapshot,
        changed_leaves: Collection[torch.Tensor] = (),
    ) -> None:
        self.recorder = recorder
        self.outputs: list[torch.Tensor] = []
        self._indices: dict[int, int] = {}
        # The templates of new containers, by id. Several places may refer to one container.
        self._containers: dict[int, ContainerTemplate] = {}
        self._snapshot = snapshot
        leaves, self.spec = tree_flatten(result)
        self.result = [self._template(leaf, _RESULT) for leaf in leaves]
        self.changes = {
            (path, self._key(key, path)): self._template(value, f"{path}[{_key_text(key)}]") for (path, key), value in changes.items()
        }
        self.requires_grad = {self._path_of_leaf(tensor): tensor.requires_grad for tensor in changed_leaves}

    def _path_of_leaf(self, tensor: torch.Tensor) -> str:
        """Returns the path of a tensor whose `requires_grad` changes. Raises: CaptureError for a tensor without a path."""
        path = self._snapshot.path_of(tensor)
        if path is None:
            raise CaptureError("the step changes requires_grad of a tensor that later calls cannot find", hint="pass it as an argument")
        # The gradient may have no path after the program, because a call may release it before.
        if path in self._snapshot.surroundings.gradients | self._snapshot.arguments.gradients:
            raise CaptureError(f"the step changes requires_grad of {path}", hint="detach the gradient, and use the result")
        return path

    def _key(self, key: Any, container_path: str) -> Any:
        """Returns the template of a place's key: an `ObjectAtPath` for an object with a path, the key itself for a plain value.

        For example, the keys of an optimizer's state are parameters, and the next call may have another model as argument.

        Raises: CaptureError for an object without a path.
        """
        if fingerprint(key) is not NO_FINGERPRINT:
            return key
        if isinstance(key, torch.Tensor):
            original = self.recorder.original(key)
            key = key if original is None else original
        path = self._snapshot.path_of(key)
        if path is None:
            hint = "use a string or a number as the key"
            raise CaptureError(
                f"the step stores a value under a key that later calls cannot find: {container_path}[{_key_text(key)}]", hint=hint
            )
        return ObjectAtPath(path)

    def _template(self, value: Any, where: str) -> Any:
        """Returns the template of a value. `where`: the place of the value, for messages.

        Raises: CaptureError for a new object of a class that a program cannot create at each call.
        """
        if type(value) is TracedNumber:
            return ComputedNumber(value)
        if value is ABSENT or isinstance(value, PLAIN):
            return value
        if isinstance(value, torch.Tensor):
            original = self.recorder.original(value)
            value = value if original is None else original
        path = self._snapshot.path_of(value)
        if path is not None:
            return ObjectAtPath(path)
        if isinstance(value, torch.Tensor):
            _refuse_lost_graph(value, where)
        if isinstance(value, torch.Tensor) and has_own_dispatch(type(value)) and not isinstance(value, FakeTensor):
            return self._wrapper(value, where)
        if isinstance(value, torch.Tensor):
            if id(value) not in self._indices:
                self._indices[id(value)] = len(self.outputs)
                self.outputs.append(value)
            return Output(self._indices[id(value)])
        if id(value) in self._containers:
            return self._containers[id(value)]
        if type(value) in (dict, OrderedDict, defaultdict, Counter):
            items = [(self._template(key, where), self._template(item, f"{where}[{key!r}]")) for key, item in value.items()]
            empty = value.copy()
            empty.clear()
            self._containers[id(value)] = ContainerTemplate(lambda pairs: _copy_with_items(empty, dict(pairs)), items)
            return self._containers[id(value)]
        if type(value) in (list, tuple, set, frozenset, deque):
            cls = type(value)
            items = [(None, self._template(item, where)) for item in value]
            self._containers[id(value)] = ContainerTemplate(lambda pairs: cls(item for _, item in pairs), items)
            return self._containers[id(value)]
        if fingerprint(value) is not NO_FINGERPRINT or _is_shareable(value):
            return value
        raise CaptureError(
            f"the step creates a {type(value).__qualname__} and stores it in {where}", hint="create such objects outside the step"
        )

    def _wrapper(self, value: Any, where: str) -> ContainerTemplate:
        """Returns the template of a wrapper tensor, such as a DTensor. Each call builds the wrapper from the program's outputs."""
        cls = type(value)
        names, context = value.__tensor_flatten__()
        size, stride = value.size(), value.stride()
        inner = {name: getattr(value, name) for name in names}
        constants = {name: part for name, part in inner.items() if not isinstance(part, torch.Tensor)}  # for example a mesh
        parts = [(name, self._template(part, f"{where}.{name}")) for name, part in inner.items() if isinstance(part, torch.Tensor)]
        return ContainerTemplate(lambda pairs: cls.__tensor_unflatten__(constants | dict(pairs), context, size, stride), parts)

    def initial_values(self, snapshot: Snapshot) -> dict[Place, Any]:
        """Returns, by place, the new values that can be computed before the step: they depend only on tensors as they are before the step.

        An example is the zeros with which Adam begins.
        """
        # Values that depend on a model among the arguments are left out: a later call may have another model, and computes its own values.
        tensors = {path: value for path, value in snapshot.surroundings.tensors.items() if not path.startswith(ARGUMENT)}
        computed = self._evaluate([self.recorder.node(output) for output in self.outputs], tensors)
        initial: dict[Place, Any] = {}
        built: dict[int, Any] = {}
        for place, template in self.changes.items():
            values = {output: computed.get(self.recorder.node(self.outputs[output.index])) for output in outputs_of(template)}
            if values and all(value is not None for value in values.values()):
                initial[place] = build(template, values.__getitem__, snapshot, built)
        return initial

    def _evaluate(self, outputs: Sequence[Node], tensors: Mapping[str, torch.Tensor]) -> dict[Node, torch.Tensor]:
        """Returns the values of those nodes in `outputs` that depend only on constants and on `tensors` as they are before the step."""
        needed = set(outputs)
        for node in reversed(self.recorder.graph.nodes):
            if node in needed:
                needed.update(node.all_input_nodes)
        values: dict[Node, Any] = {}
        overwritten: set[Node] = set()
        paths = {placeholder: path for path, placeholder in self.recorder.tensor_placeholders.items()}
        for node in self.recorder.graph.nodes:
            if node.op == "placeholder" and paths.get(node) in tensors:
                values[node] = tensors[paths[node]]
            elif node.op == "get_attr":
                values[node] = self.recorder.constants[node.target]
            elif (
                node.op == "call_function"
                and node in needed
                and _is_pure(node)
                and all(source in values and source not in overwritten for source in node.all_input_nodes)
            ):
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                with torch.no_grad():
                    values[node] = node.target(*args, **kwargs)
            overwritten.update(written_nodes(node))
        used = {storage_id(tensor) for tensor in [*tensors.values(), *self.recorder.constants.values()]}
        results = {node: values[node] for node in outputs if node in values}
        return {node: value.clone() if storage_id(value) in used else value for node, value in results.items()}

    def values_after(self, snapshot: Snapshot, initial: Mapping[Place, Any]) -> dict[Place, Any]:
        """Returns the values of the changed places after a step in this state, by place.

        New tensors have the right shapes, but no values, unless `initial` has their values.
        """

        @functools.cache
        def empty(output: Output) -> torch.Tensor:
            fake = self.outputs[output.index]
            return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)

        built: dict[int, Any] = {}
        return {
            place: initial[place] if place in initial else build(template, empty, snapshot, built)
            for place, template in self.changes.items()
        }

    def has_same_program(self, other: Recording, initial: Mapping[Place, Any]) -> bool:
        """True if the other recording has the same program, apart from the nodes that compute the values in `initial`.

        These values must be inputs of the other recording.
        """
        initial_nodes = {self.recorder.node(self.outputs[output.index]) for place in initial for output in outputs_of(self.changes[place])}
        if other.changes.keys() - self.changes.keys() or self.requires_grad != other.requires_grad:
            return False
        # Places that only the first call changes get their new values before the program runs. So if such a value is a number, the program
        # would read the new number in place of the old one.
        changed_once = {place: self.changes[place] for place in self.changes.keys() - other.changes.keys()}
        if any(place in self.recorder.traced_numbers.places or numbers_of(template) for place, template in changed_once.items()):
            return False
        pairs = _NodePairs(self.recorder, other.recorder, initial_nodes)
        if not pairs.pair_all():
            return False
        for place, template in self.changes.items():
            other_template = other.changes.get(place)
            is_compared = outputs_of(template) or (place in other.changes and not outputs_of(other_template))
            if place not in initial and is_compared and not self._gives_equal_results(template, other, other_template, pairs.found):
                return False
        return len(self.result) == len(other.result) and all(
            self._gives_equal_results(template, other, other_template, pairs.found)
            for template, other_template in zip(self.result, other.result, strict=True)
        )

    def first_difference(self, other: Recording) -> tuple[str, str]:
        """Returns a text with the first op that differs in the other recording and the two differing arguments, and the user's line.

        Returns "" and "" if no such op is found.
        """
        for own_node, other_node in zip(self.recorder.graph.nodes, other.recorder.graph.nodes, strict=False):
            if own_node.op != "call_function" or other_node.op != "call_function":
                continue
            values = [tree_leaves((node.target, node.args, node.kwargs)) for node in (own_node, other_node)]
            for value, other_value in zip(*values, strict=False):
                if not isinstance(value, Node) and not isinstance(other_value, Node) and value != other_value and value == value:
                    line = re.fullmatch(r'\s*File "(.*)", line (\d+), in (.*)', own_node.meta.get("stack_trace", ""))
                    where = "{}:{}, in {}".format(*line.groups()) if line else ""
                    return f"{own_node.target} gets {value} in one run, {other_value} in the next", where
        return "", ""

    def _gives_equal_results(self, template: Any, other: Recording, other_template: Any, pairs: Mapping[Node, Node]) -> bool:
        """True if a template of this recording and a template of the other recording give equal results.

        Python values in the templates have to be equal, because a replayed program repeats these values. `pairs` has the node of the other
        recording for each node of this one.
        """
        if type(template) is not type(other_template):
            return False
        if isinstance(template, Output):
            return pairs.get(self.recorder.node(self.outputs[template.index])) is other.recorder.node(other.outputs[other_template.index])
        if isinstance(template, ComputedNumber):
            return template.number.dynaxla_formula == other_template.number.dynaxla_formula
        if isinstance(template, ContainerTemplate):
            items, other_items = ([item for pair in container.items for item in pair] for container in (template, other_template))
            return len(items) == len(other_items) and all(
                self._gives_equal_results(item, other, other_item, pairs) for item, other_item in zip(items, other_items, strict=True)
            )
        return fingerprint(template) == fingerprint(other_template) and (
            not isinstance(template, ObjectAtPath) or template == other_template
        )


class _NodePairs:
    """The pairs of equal nodes of two recorded graphs. The values of the first graph's `initial_nodes` are inputs of the second graph.

    Attributes:
        found: the node of the second graph for each node of the first.
    """

    def __init__(self, recorder: Recorder, other: Recorder, initial_nodes: Collection[Node]) -> None:
        self._recorder, self._other, self._initial_nodes = recorder, other, initial_nodes
        self._paths = {node: path for path, node in recorder.tensor_placeholders.items()}
        self._other_paths = {node: path for path, node in other.tensor_placeholders.items()}
        self.found: dict[Node, Node] = {}

    def pair_all(self) -> bool:
        """Pairs the nodes. Returns False if a node differs from its counterpart.

        Nodes whose results are used only for the initial nodes have no counterpart.
        """
        skipped = set(self._initial_nodes)
        nodes = [node for node in self._recorder.graph.nodes if node.op != "placeholder"]
        for node in reversed(nodes):
            if node not in skipped and node.users and all(user in skipped for user in node.users) and not written_nodes(node):
                skipped.add(node)
        nodes = [node for node in nodes if node not in skipped]
        other_nodes = [node for node in self._other.graph.nodes if node.op != "placeholder"]
        return len(nodes) == len(other_nodes) and all(map(self._pair, nodes, other_nodes))

    def _pair(self, node: Node, other: Node) -> bool:
        """Pairs two nodes if their targets and arguments are equal. Returns False if they are not."""
        if node.op != other.op or (node.op == "call_function" and node.target is not other.target):
            return False
        if node.op == "get_attr":
            constant, other_constant = self._recorder.constants[node.target], self._other.constants[other.target]
            if constant.dtype != other_constant.dtype or not torch.equal(constant, other_constant):
                return False
        elif not self._are_equal((node.args, tuple(sorted(node.kwargs.items()))), (other.args, tuple(sorted(other.kwargs.items())))):
            return False
        self.found[node] = other
        return True

    def _are_equal(self, a: Any, b: Any) -> bool:
        """True if two arguments are equal: one of a node of the first graph, and one of a node of the second. NaN equals NaN."""
        if isinstance(a, Node) and isinstance(b, Node):
            if a in self.found:
                return self.found[a] is b
            if a in self._initial_nodes:
                self.found[a] = b
                return b in self._other_paths
            if a.op == b.op == "placeholder":
                self.found[a] = b
                return self._paths.get(a) == self._other_paths.get(b) and self._recorder.formula_of(a) == self._other.formula_of(b)
            return False
        if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
            return len(a) == len(b) and all(map(self._are_equal, a, b))
        return type(a) is type(b) and (a == b or (a != a and b != b))


def _refuse_lost_graph(tensor: torch.Tensor, where: str) -> None:
    """Refuses a new tensor with a state of autograd that the program's output does not have.

    Returned tensors are detached anyway. A stored tensor whose graph has been freed, such as a loss after `backward`, may be detached, too.

    Raises: CaptureError for a parameter, a leaf that requires grad, and a stored tensor from which later code could call `backward`.
    """
    if isinstance(tensor, torch.nn.Parameter) or (tensor.requires_grad and tensor.is_leaf):
        raise CaptureError(f"{where} is a new parameter, or a new leaf tensor that requires grad", hint="create it outside the step")
    if tensor.requires_grad and where != _RESULT and not _is_freed(tensor.grad_fn):
        raise CaptureError(f"the step stores a tensor with its graph of autograd in {where}", hint="store tensor.detach()")


def _is_freed(node: Any) -> bool:
    """True if autograd has freed saved tensors of this node, or of a node that its gradient flows to."""
    nodes, seen = [node], {node}
    for node in nodes:
        for name in dir(node):
            if name.startswith("_saved_") or name == "saved_tensors":
                try:
                    getattr(node, name)
                except RuntimeError:  # torch raises it if the tensor has been freed
                    return True
        following = {item for item, _ in node.next_functions if item is not None} - seen
        nodes += following
        seen |= following
    return False


def _is_shareable(value: Any) -> bool:
    """True for a class, a module, or a function without state, which every replay may store without a copy."""
    if isinstance(value, types.FunctionType):
        return value.__closure__ is None and not value.__defaults__ and not value.__kwdefaults__
    return isinstance(value, (type, types.BuiltinFunctionType, types.ModuleType, torch._ops.OpOverload, torch._ops.OpOverloadPacket))


def _is_pure(node: Node) -> bool:
    """True if a node is deterministic and has no effects. A collective is not pure: other processes may not call it at the same time."""
    op = node.target
    if written_nodes(node) or is_collective(node):
        return False
    return not isinstance(op, torch._ops.OpOverload) or not (op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags)


@dataclass(frozen=True)
class ContainerTemplate:
    """The template of a container, or of a wrapper tensor.

    Attributes:
        make: makes the container from its (key, item) pairs.
        items: (key, item) pairs of templates. In a list or set the keys are None.
    """

    make: Callable[[list[tuple[Any, Any]]], Any]
    items: Sequence[tuple[Any, Any]]


def _copy_with_items(empty: Any, items: dict[Any, Any]) -> Any:
    """Returns a copy of `empty`, a dict such as an OrderedDict or defaultdict, with these items."""
    filled = empty.copy()
    filled.update(items)
    return filled


def _leaves(template: Any) -> Iterator[Any]:
    """Yields the templates in a template that are not containers."""
    if isinstance(template, ContainerTemplate):
        for pair in template.items:
            for item in pair:
                yield from _leaves(item)
    else:
        yield template


def outputs_of(template: Any) -> list[Output]:
    """Returns the program's outputs in a template."""
    return [leaf for leaf in _leaves(template) if isinstance(leaf, Output)]


def numbers_of(template: Any) -> list[TracedNumber]:
    """Returns the traced numbers in a template."""
    return [leaf.number for leaf in _leaves(template) if isinstance(leaf, ComputedNumber)]


def object_paths_of(template: Any) -> list[str]:
    """Returns the paths of the `ObjectAtPath`s in a template."""
    return [leaf.path for leaf in _leaves(template) if isinstance(leaf, ObjectAtPath)]


def build(template: Any, output: Callable[[Output], torch.Tensor], snapshot: Snapshot, built: dict[int, Any]) -> Any:
    """Returns the value of a template.

    Args:
        template: the template.
        output: returns the program's tensor for an `Output`.
        snapshot: the state before the call.
        built: the containers that the call has built so far, by the id of their template. This function adds containers.
    """
    if isinstance(template, Output):
        return output(template)
    if isinstance(template, ObjectAtPath):
        return snapshot.object_at(template.path)
    if isinstance(template, ComputedNumber):
        return evaluate(template.number.dynaxla_formula, snapshot.number_at)
    if isinstance(template, ContainerTemplate):
        if id(template) not in built:
            pairs = [(build(key, output, snapshot, built), build(item, output, snapshot, built)) for key, item in template.items]
            built[id(template)] = template.make(pairs)
        return built[id(template)]
    return template
