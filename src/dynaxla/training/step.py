"""A whole training step as one XLA program, but for what torch does faster in place at its end (see updates.py).

The function is run on fake tensors (see recorder.py), once in the state that it finds and once in the state that it would leave behind:
where the two give the same program, as they do for most optimizers once their state exists, that one program serves all steps.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch.fx import Node
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..backend import compile_graph
from ..config import Options
from ..errors import CaptureError
from ..observe import metrics
from ..runtime.cache import LeastRecentlyUsed
from .recorder import Recorder
from .scalars import Compared, Place, TracedFloat
from .surroundings import ABSENT, PLAIN, Walk, meta, storage_of, walk
from .updates import take_updates, written

P = ParamSpec("P")
R = TypeVar("R")
_seeds = itertools.count(1)
_numbers = itertools.count()


@overload
def compile_step(function: Callable[P, R], *, options: Mapping[str, Any] | None = None) -> CompiledStep[P, R]: ...


@overload
def compile_step(function: None = None, *, options: Mapping[str, Any] | None = None) -> Callable[[Callable[P, R]], CompiledStep[P, R]]: ...


def compile_step(function: Any = None, *, options: Mapping[str, Any] | None = None) -> Any:
    """Compile a training step: a function that runs a model, calls `loss.backward()`, steps an optimizer, zeroes gradients.

    function: ordinary code; what it returns may be tensors (detached), Python values, and containers of both. options: as for
    `torch.compile(..., backend="dynaxla", options=...)`. Without a function it is a decorator: `@compile_step(options={...})`.

    All that the function reads besides its arguments (modules, optimizers, closures, globals) is found by walking from it, and watched: if
    Python values, shapes, dtypes, flags or which parameters require gradients differ from those of all earlier steps, the step is recorded
    again. Learning rates are inputs of the program. Parameters, buffers, gradients and optimizer state are read and written in place. What
    lies outside Python (files, the environment) is read while the step is recorded, and not again.

    Raises, when called: CaptureError for a step that cannot be one program (it looks at a tensor's value, or changes a Python value at each
    step); what the function itself raises. Parameters and optimizer state are then as they were (unless torch's own update in place fails,
    for want of memory); gradients that the step would have replaced are None, as after `zero_grad`.
    """
    if function is None:
        return functools.partial(compile_step, options=options)
    return CompiledStep(function, Options.parse(options, None))


@dataclass(frozen=True)
class _State:
    """What a step found around it: the walk, the places in it that are inputs of the program, and what stands for its facts."""

    around: Walk
    inputs: frozenset[Place]
    number: int


class CompiledStep(Generic[P, R]):
    """A function as one program per combination of what it reads; see `compile_step`."""

    def __init__(self, function: Callable[P, R], options: Options) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._options = options
        self._programs: LeastRecentlyUsed[_Program] = LeastRecentlyUsed(options.executables)
        self._baked: set[Place] = set()
        self._known: _State | None = None
        self._numbers: LeastRecentlyUsed[int] = LeastRecentlyUsed(options.executables)
        self._lock = threading.RLock()

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            around = self._around()
            given = walk({"args": args, "kwargs": kwargs}, around)
            key = self._key(around, given)
            program = self._programs.get(key)
            if program is not None:
                return program.run(around, given)
            self._known = None  # learning rates may have changed since
            around = self._around()
            given = walk({"args": args, "kwargs": kwargs}, around)
            program, initial = self._capture(around, given, args, kwargs)
            if not initial:
                return program.run(around, given)
            try:
                _put(around, initial)
                later = self._around()
                return program.run(later, walk({"args": args, "kwargs": kwargs}, later))
            except BaseException:
                around.restore()
                raise

    def _around(self) -> Walk:
        """What the function can read now."""
        if self._known is None or not self._known.around.is_unchanged(self._known.inputs):
            found = walk({"step": self._function})
            inputs = self._inputs(found)
            self._known = _State(found, frozenset(inputs), self._number_of(found, inputs))
        return self._known.around

    def _number_of(self, around: Walk, inputs: Collection[Place]) -> int:
        """What stands for the facts about surroundings: the same for equal ones, and quicker to compare."""
        facts = _frozen(around.facts(inputs))
        number = self._numbers.get(facts)
        if number is None:
            number = next(_numbers)
            self._numbers.put(facts, number)
        return number

    def _inputs(self, around: Walk) -> dict[Place, float]:
        """The numbers that are inputs of the program: learning rates."""
        return {
            place: group["lr"]
            for path, optimizer in around.optimizers.items()
            for index, group in enumerate(optimizer.param_groups)
            if isinstance(group.get("lr"), float) and (place := (f"{path}.param_groups[{index}]", "lr")) not in self._baked
        }

    def _key(self, around: Walk, given: Walk) -> Any:
        known = self._known
        number = known.number if known is not None and known.around is around else self._number_of(around, self._inputs(around))
        return number, _frozen(given.facts()), _global_state()

    # What follows happens once per combination.

    def _capture(self, around: Walk, given: Walk, args: Any, kwargs: Any) -> tuple[_Program, dict[Place, Any]]:
        """Record the step in this state and in the one that it leaves, and compile it."""
        with metrics.timed("capture"):
            try:
                return self._settled(around, given, args, kwargs)
            except Compared:
                self._bake(around)
                return self._settled(around, given, args, kwargs)

    def _bake(self, around: Walk) -> None:
        """Learning rates become constants: Python looks at them, or computes with them in ways that cannot be followed."""
        self._baked.update(self._inputs(around))
        self._known = None

    def _settled(self, around: Walk, given: Walk, args: Any, kwargs: Any) -> tuple[_Program, dict[Place, Any]]:
        """The program for this state, and what must be put in place before it runs."""
        own = self._key(around, given)
        first = self._record(around, given, args, kwargs)
        initial = first.initial_values(around)
        try:
            _put(around, first.left(around, initial))  # in shapes, if not in numbers
            later = walk({"step": self._function})
            later_given = walk({"args": args, "kwargs": kwargs}, later)
            second = self._record(later, later_given, args, kwargs)
            self._check_settled(later, second)
            if first.is_like(second, initial):
                program = _Program(second, later, later_given)
                program.compile(self._options, later, later_given)
                self._programs.put(self._key(later, later_given), program)
                if not first.changes.keys() - second.changes.keys():
                    self._programs.put(own, program)
                    return program, {}
                return program, {place: value for place, value in first.left(around, initial).items() if place not in second.changes}
            following, following_key = _Program(second, later, later_given), self._key(later, later_given)
        finally:
            around.restore()
        again = self._record(around, given, args, kwargs)
        if not first.is_like(again, {}):
            if self._inputs(around):
                raise Compared
            hint = "compute with tensors, and give the step what changes as an argument"
            raise CaptureError(
                "a step computes in Python with a number that differs from run to run (random, time, a tensor's value)", hint=hint
            )
        program = _Program(again, around, given)
        program.compile(self._options, around, given)
        self._programs.put(own, program)
        if following.share(program):
            self._programs.put(following_key, following)
        return program, {}

    def _check_settled(self, around: Walk, recording: _Recording) -> None:
        """Raises: CaptureError if the step would find another state each time."""
        try:
            _put(around, recording.left(around, {}))
            after = walk({"step": self._function})
            differing = _difference(around.facts(self._inputs(around)), after.facts(self._inputs(after)))
        finally:
            around.restore()
        if differing:
            hint = "do that outside the step, or keep the number in a tensor"
            raise CaptureError(f"a step changes {differing} in Python every time that it runs, which a program cannot", hint=hint)

    def _record(self, around: Walk, given: Walk, args: Any, kwargs: Any) -> _Recording:
        """Run the function on fake tensors; everything that it changes is as before afterwards."""
        tensors = around.tensors | given.tensors
        recorder = Recorder(tensors, next(_seeds))
        flags = {path: tensor.requires_grad for path, tensor in tensors.items()}
        # During the recording only: learning rates are traced, step counts stay in tensors, and ops are ATen's ordinary ones.
        numbers = {place: recorder.table.at(place) for place in self._inputs(around)}
        switches = [(group, _switches(group, item.state)) for item in around.optimizers.values() for group in item.param_groups]
        switched = [(group, key, group[key]) for group, settings in switches for key in settings]
        try:
            _put(around, numbers)
            for group, settings in switches:
                group.update(settings)
            result = recorder.run(self._function, args, kwargs)
            for (path, key), number in numbers.items():
                if around.holders[path].target.get(key) is number:
                    around.holders[path].put(key, around.holders[path].items[key])
            for group, key, value in switched:
                group[key] = value
            walks = {path: holder for walked in (around, given) for path, holder in walked.holders.items()}
            changes = {(path, key): value for path, holder in walks.items() for key, value in holder.changes().items() if key != _CHECKED}
            changed = [path for path, tensor in tensors.items() if tensor.requires_grad != flags[path]]
            if changed:
                hint = "detach what is written to it, or set requires_grad outside the step"
                raise CaptureError(f"a step changes whether {changed[0]} requires gradients", hint=hint)
            return _Recording(recorder, result, changes, given)
        finally:
            for group, key, value in switched:
                group[key] = value
            around.restore()
            given.restore()
            for path, tensor in tensors.items():
                if tensor.requires_grad != flags[path]:
                    if tensor.grad_fn is not None:
                        tensor.detach_()
                    tensor.requires_grad_(flags[path])


# An optimizer's note that its parameters suit fused steps. The recording leaves none: it asked for such a step, not the user.
_CHECKED = "_need_device_dtype_check_for_fused"


def _switches(group: Mapping[str, Any], state: Mapping[Any, Any]) -> dict[str, bool]:
    """What a group of parameters is told during the recording.

    Adam's capturable step divides by the learning rate: of 0, as a warmup starts with, and second moments of 0 it makes NaNs. Its fused one
    does not. Fused steps can be done in torch's own memory (see updates.py).

    state: the optimizer's.
    """
    found = {"capturable": True} if "capturable" in group else {}
    if "fused" in group and not group.get("differentiable") and all(parameter.is_floating_point() for parameter in group["params"]):
        if "capturable" in group:
            found["fused"] = True
        elif "nesterov" in group:
            learning = [parameter for parameter in group["params"] if parameter.requires_grad or parameter.grad is not None]
            if len({"momentum_buffer" in state.get(parameter, ()) for parameter in learning}) == 1:  # SGD's needs all of them, or none
                found |= {"fused": True, "foreach": False}
    return found


def _put(around: Walk, values: Mapping[Place, Any]) -> None:
    for (path, key), value in values.items():
        around.holders[path].put(key, value)


def _frozen(facts: Mapping[str, Any]) -> Any:
    return tuple((path, tuple(value) if isinstance(value, list) else value) for path, value in facts.items())


def _difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The path of something that differs, or ""."""
    for path in [*before, *after]:
        old, new = before.get(path), after.get(path)
        if old != new:
            if isinstance(old, list) and isinstance(new, list):
                known = dict(old)
                keys = [key for key, value in new if known.get(key, ABSENT) != value]
                return f"{path}[{keys[0]!r}]" if keys else path
            return path
    return ""


def _global_state() -> tuple[Any, ...]:
    """torch's own switches that a recording depends on."""
    autocast = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(), *autocast


@dataclass(frozen=True)
class _Output:
    """A tensor that the program gives."""

    index: int


@dataclass(frozen=True)
class _Known:
    """A thing that is found by its path."""

    path: str


@dataclass(frozen=True)
class _Computed:
    """A number that Python computes from learning rates."""

    number: TracedFloat


class _Recording:
    """What a run of the function gave: its graph, its result, and what it changed in Python.

    Attributes: outputs (fake tensors that the program must give); changes (place -> template of the new value).
    """

    def __init__(self, recorder: Recorder, result: Any, changes: Mapping[Place, Any], given: Walk) -> None:
        self.recorder = recorder
        self.outputs: list[torch.Tensor] = []
        self._indices: dict[int, int] = {}
        self._given = given
        leaves, self.spec = tree_flatten(result)
        self.result = [self._template(leaf, "its result") for leaf in leaves]
        self.changes = {place: self._template(value, f"{place[0]}[{place[1]!r}]") for place, value in changes.items()}

    def _template(self, value: Any, where: str) -> Any:
        """The value with `_Output`, `_Known` and `_Computed` for what is not yet there."""
        if isinstance(value, TracedFloat):
            return _Computed(value)
        if value is ABSENT or isinstance(value, PLAIN):
            return value
        if isinstance(value, torch.Tensor):
            known = self.recorder.original(value)
            value = value if known is None else known
        path = self._given.path_of(value)
        if path is not None:
            return _Known(path)
        if isinstance(value, torch.Tensor):
            if id(value) not in self._indices:
                self._indices[id(value)] = len(self.outputs)
                self.outputs.append(value)
            return _Output(self._indices[id(value)])
        if isinstance(value, dict):
            items = [(self._template(key, where), self._template(item, f"{where}[{key!r}]")) for key, item in value.items()]
            like = value.copy()
            like.clear()
            return _Built(lambda made: _filled(like, dict(made)), items)
        if type(value) in (list, tuple, set, frozenset, deque):
            kind = type(value)
            return _Built(lambda made: kind(item for _, item in made), [(None, self._template(item, where)) for item in value])
        if callable(value) or not hasattr(value, "__dict__"):
            return value
        raise CaptureError(f"a step leaves a new {type(value).__qualname__} behind in {where}", hint="make such objects outside the step")

    def initial_values(self, around: Walk) -> dict[Place, Any]:
        """New state that the step makes of nothing but what is there already, as it is before the step changes it."""
        made = self._evaluate([self.recorder.node(output) for output in self.outputs], around)
        found: dict[Place, Any] = {}
        for place, template in self.changes.items():
            values = {output: made.get(self.recorder.node(self.outputs[output.index])) for output in _outputs_of(template)}
            if values and all(value is not None for value in values.values()):
                found[place] = _build(template, values.__getitem__, around)
        return found

    def _evaluate(self, outputs: Sequence[Node], around: Walk) -> dict[Node, torch.Tensor]:
        """What nodes give: those that hang on tensors around the step only, not on its arguments, chance, or what it has changed before."""
        wanted = set(outputs)
        for node in reversed(self.recorder.graph.nodes):
            if node in wanted:
                wanted.update(node.all_input_nodes)
        known: dict[Node, Any] = {}
        overwritten: set[Node] = set()
        paths = {placeholder: path for path, placeholder in self.recorder.leaves.items()}
        for node in self.recorder.graph.nodes:
            if node.op == "placeholder" and paths.get(node) in around.tensors:
                known[node] = around.tensors[paths[node]]
            elif node.op == "get_attr":
                known[node] = self.recorder.constants[node.target]
            elif (
                node.op == "call_function"
                and node in wanted
                and _is_pure(node)
                and all(source in known and source not in overwritten for source in node.all_input_nodes)
            ):
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                with torch.no_grad():
                    known[node] = node.target(*args, **kwargs)
            overwritten.update(written(node))
        taken = {tensor.untyped_storage()._cdata for tensor in [*around.tensors.values(), *self.recorder.constants.values()]}
        found = {node: known[node] for node in outputs if node in known}
        return {node: value.clone() if value.untyped_storage()._cdata in taken else value for node, value in found.items()}

    def left(self, around: Walk, initial: Mapping[Place, Any]) -> dict[Place, Any]:
        """What stands in the changed places after a step; new tensors not of `initial` have no values."""

        @functools.cache
        def empty(output: _Output) -> torch.Tensor:
            fake = self.outputs[output.index]
            return torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype, device=fake.device)

        return {place: initial[place] if place in initial else _build(template, empty, around) for place, template in self.changes.items()}

    def is_like(self, other: _Recording, initial: Mapping[Place, Any]) -> bool:
        """Whether the other's program is the same, with those of its inputs for this one's new state that are `initial`."""
        made = {}
        for place in initial:
            for output in _outputs_of(self.changes[place]):
                made[self.recorder.node(self.outputs[output.index])] = output
        skipped = set(made)
        users = [node for node in reversed(list(self.recorder.graph.nodes)) if node.op != "placeholder"]
        for node in users:  # what is used for nothing but making new state
            if node not in skipped and node.users and all(user in skipped for user in node.users) and not written(node):
                skipped.add(node)
        mine = [node for node in self.recorder.graph.nodes if node.op != "placeholder" and node not in skipped]
        others = [node for node in other.recorder.graph.nodes if node.op != "placeholder"]
        if len(mine) != len(others):
            return False
        pairs: dict[Node, Node] = {}
        theirs = {node: path for path, node in other.recorder.leaves.items()}
        paths = {node: path for path, node in self.recorder.leaves.items()}

        def same(one: Any, two: Any) -> bool:
            if isinstance(one, Node) and isinstance(two, Node):
                if one in pairs:
                    return pairs[one] is two
                if one in made:
                    pairs[one] = two
                    return two in theirs
                if one.op == two.op == "placeholder":
                    pairs[one] = two
                    return paths.get(one) == theirs.get(two) and self.recorder.key_of(one) == other.recorder.key_of(two)
                return False
            if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
                return len(one) == len(two) and all(map(same, one, two))
            return type(one) is type(two) and (one == two or (one != one and two != two))

        for one, two in zip(mine, others, strict=True):
            if one.op != two.op or (one.op == "call_function" and one.target is not two.target):
                return False
            if one.op == "get_attr":
                left, right = self.recorder.constants[one.target], other.recorder.constants[two.target]
                if left.dtype != right.dtype or not torch.equal(left, right):
                    return False
            elif not same(one.args, two.args) or not same(tuple(sorted(one.kwargs.items())), tuple(sorted(two.kwargs.items()))):
                return False
            pairs[one] = two
        for place, template in self.changes.items():
            found = other.changes.get(place)
            if place not in initial and _outputs_of(template) and not self._gives(template, other, found, pairs):
                return False
        return len(self.result) == len(other.result) and all(
            self._gives(one, other, two, pairs) for one, two in zip(self.result, other.result, strict=True)
        )

    def _gives(self, template: Any, other: _Recording, found: Any, pairs: Mapping[Node, Node]) -> bool:
        """Whether a result of this recording is that of the other one."""
        one, two = _outputs_of(template), _outputs_of(found)
        return type(template) is type(found) and [pairs.get(self.recorder.node(self.outputs[item.index])) for item in one] == [
            other.recorder.node(other.outputs[item.index]) for item in two
        ]


def _is_pure(node: Node) -> bool:
    """Whether a node gives the same each time, and does nothing else."""
    op = node.target
    if not isinstance(op, torch._ops.OpOverload):
        return not written(node)
    return not op._schema.is_mutable and torch.Tag.nondeterministic_seeded not in op.tags


@dataclass(frozen=True)
class _Built:
    """A container that is made anew: of (key, item) templates."""

    make: Callable[[list[tuple[Any, Any]]], Any]
    items: Sequence[tuple[Any, Any]]


def _filled(empty: Any, items: dict[Any, Any]) -> Any:
    """A dict of the kind of `empty` (an OrderedDict, a defaultdict) with these items."""
    made = empty.copy()
    made.update(items)
    return made


def _outputs_of(template: Any) -> list[_Output]:
    if isinstance(template, _Output):
        return [template]
    if isinstance(template, _Built):
        return [output for pair in template.items for item in pair for output in _outputs_of(item)]
    return []


def _known_of(template: Any) -> list[str]:
    """The paths of what a template finds by its path."""
    if isinstance(template, _Known):
        return [template.path]
    if isinstance(template, _Built):
        return [path for pair in template.items for item in pair for path in _known_of(item)]
    return []


def _build(template: Any, output: Callable[[_Output], torch.Tensor], around: Walk) -> Any:
    if isinstance(template, _Output):
        return output(template)
    if isinstance(template, _Known):
        return around.object_at(template.path)
    if isinstance(template, _Computed):
        return template.number.compute(around.number_at)
    if isinstance(template, _Built):
        return template.make([(_build(key, output, around), _build(item, output, around)) for key, item in template.items])
    return template


class _Program:
    """A recording as a program of XLA, and the updates that torch does after it."""

    def __init__(self, recording: _Recording, around: Walk, given: Walk) -> None:
        self._result, self._spec, self._changes = recording.result, recording.spec, recording.changes
        recorder = recording.recorder
        paths = {node: path for path, node in recorder.leaves.items()}
        self._outputs = [recorder.node(output) for output in recording.outputs]
        self._updates = take_updates(recorder.graph, self._outputs)
        made = {update.node for update in self._updates}
        read = dict.fromkeys(node for update in self._updates for node in update.nodes() if node not in made)
        self._computed = list(
            dict.fromkeys([node for node in self._outputs if node not in made] + [node for node in read if node.op != "placeholder"])
        )
        self._sources = {node: paths.get(node) or recorder.numbers[node] for node in read if node.op == "placeholder"}
        for node in list(recorder.graph.nodes):
            if node.op == "placeholder" and not node.users and node not in self._computed:
                recorder.graph.erase_node(node)
        placeholders = [node for node in recorder.graph.nodes if node.op == "placeholder"]
        self._inputs: list[str | TracedFloat] = [paths.get(node) or recorder.numbers[node] for node in placeholders]
        self._new_gradients = [path for (path, key), template in self._changes.items() if key == "grad" and isinstance(template, _Output)]
        templates = [*self._result, *self._changes.values()]
        self._used = {
            *(item for item in [*self._inputs, *self._sources.values()] if isinstance(item, str)),
            *(path for template in templates for path in _known_of(template)),
        }
        self._module = recorder.module(self._computed)
        examples = self._tensors(around, given)
        storages = {storage_of(tensor): index for index, tensor in reversed(list(enumerate(examples)))}
        self._layouts = [(meta(tensor), storages[storage_of(tensor)], tensor.storage_offset()) for tensor in examples]
        self._compiled: Callable[..., Sequence[torch.Tensor]] | None = None

    def compile(self, options: Options, around: Walk, given: Walk) -> None:
        with torch.no_grad():
            self._compiled = compile_graph(self._module, self._tensors(around, given), options)

    def share(self, other: _Program) -> bool:
        """Run the other's program of XLA if it is the same: two steps may differ in their updates alone."""
        mine, theirs = dict(self._module.named_buffers()), dict(other._module.named_buffers())
        same = (
            self._module.code == other._module.code
            and self._layouts == other._layouts
            and mine.keys() == theirs.keys()
            and all(tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]) for name, tensor in mine.items())
        )
        if same:
            self._compiled = other._compiled
        return same

    def _tensors(self, around: Walk, given: Walk) -> list[torch.Tensor]:
        return [
            torch.tensor(item.compute(around.number_at), dtype=torch.float64) if isinstance(item, TracedFloat) else given.tensor_at(item)
            for item in self._inputs
        ]

    def run(self, around: Walk, given: Walk) -> Any:
        assert self._compiled is not None
        tensors = self._tensors(around, given)
        released = around.release_gradients(self._new_gradients, self._used)
        with torch.no_grad():
            found: dict[Node, Any] = dict(zip(self._computed, self._compiled(*tensors), strict=True))
            for node, source in self._sources.items():
                found.setdefault(node, source.compute(around.number_at) if isinstance(source, TracedFloat) else given.tensor_at(source))
            for update in self._updates:
                found[update.node] = update.run(found.__getitem__)
        outputs = [found[node] for node in self._outputs]
        metrics.add("steps")
        for (path, key), template in self._changes.items():
            holder = around.holders.get(path) or given.holders[path]
            holder.put(key, _build(template, lambda output: outputs[output.index], given))
        around.accept_gradients(released)
        leaves = [_build(template, lambda output: outputs[output.index], given) for template in self._result]
        return tree_unflatten(leaves, self._spec)
