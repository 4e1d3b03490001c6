"""Tests of guards/object_graph.py and guards/object_walker.py: each change of state that eager mode would notice is noticed."""

from __future__ import annotations

import collections
import contextvars
import decimal
import enum
import fractions
import functools
import itertools
import logging
import operator
import os
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dynaxla
from dynaxla.guards.object_graph import ObjectGraph
from dynaxla.guards.object_walker import walk
from dynaxla.guards.observation import observe
from dynaxla.observe import metrics
from support.processes.scripts import run_script

X = torch.arange(6.0)


def check(function: Callable[..., Any], *changes: Callable[[], Any], args: Callable[[], tuple[Any, ...]] = lambda: (X,)) -> None:
    """Asserts that after each change the compiled function returns the function's results, in eager mode and as a program."""
    compiled = dynaxla.compile_step(function)
    for change in (lambda: None, *changes):
        change()
        for _ in range(3):
            torch.testing.assert_close(compiled(*args()), function(*args()))


def check_arguments(function: Callable[[torch.Tensor, Any], torch.Tensor], *values: Any) -> None:
    compiled = dynaxla.compile_step(function)
    for value in itertools.chain(*itertools.repeat(values, 3)):
        torch.testing.assert_close(compiled(X, value), function(X, value), msg=repr(value))


@dataclass(frozen=True)
class Frozen:
    factor: float


@dataclass
class Mutable:
    factor: float
    settings: dict[str, Any]


class Kind(enum.Enum):
    DOUBLE = 2
    TRIPLE = 3


@pytest.mark.parametrize(
    "values",
    [
        (np.float32(2), np.float32(3)),
        (np.int64(2), np.int64(3), 3, True),
        (decimal.Decimal("2"), decimal.Decimal("3")),
        (fractions.Fraction(1, 2), fractions.Fraction(1, 3)),
        (2, 2.5, 3, True),
        (0.0, -0.0),
        (Frozen(2.0), Frozen(3.0)),
        (Mutable(2.0, {}), Mutable(3.0, {})),
        (Kind.DOUBLE, Kind.TRIPLE),
    ],
    ids=lambda values: type(values[0]).__name__,
)
def test_numbers_as_arguments(values: tuple[Any, ...]) -> None:
    def function(x: torch.Tensor, value: Any) -> torch.Tensor:
        number = getattr(value, "factor", getattr(value, "value", value))
        return x * float(number) + (1 if isinstance(number, bool) else 0) + torch.tensor(float(number)).signbit()

    check_arguments(function, *values)


def test_tensors_that_differ_in_a_flag_or_an_offset() -> None:
    conjugate = torch.arange(6) * (1 + 1j)
    with torch.inference_mode():
        inference = torch.arange(6.0)
    check_arguments(lambda x, value: x * (1 + value.is_conj()), conjugate, conjugate.conj())
    check_arguments(lambda x, value: x * (1 + value.is_neg()), conjugate.imag, conjugate.conj().imag)
    check_arguments(lambda x, value: x * (1 + value.is_inference()), X.clone(), inference)
    buffer = torch.arange(12.0)
    check_arguments(lambda x, part: x * part.storage_offset(), buffer[4:8], buffer[5:9])
    check_arguments(lambda x, part: x * part.as_strided((1,), (1,), 6), buffer[4:8], buffer[5:9])
    check_arguments(lambda x, parts: x * parts[1].as_strided((1,), (1,), 6), (buffer[3:7], buffer[4:8]), (buffer[4:8], buffer[5:9]))


def test_slices_as_arguments() -> None:
    check_arguments(lambda x, part: x[part], slice(0, 3), slice(0, 5), slice(0, 5, 2), slice(None))
    check_arguments(lambda x, parts: x[parts[0]], (slice(0, 3),), (slice(0, 5),))
    check_arguments(lambda x, parts: x[parts["part"]], {"part": slice(0, 3)}, {"part": slice(0, 5)})


def test_other_values_as_arguments() -> None:
    check_arguments(lambda x, values: x * sum(values), range(3), range(4), range(0, 4, 2))
    check_arguments(lambda x, values: x * len(values), b"one", b"three", bytearray(b"seven"))
    check_arguments(lambda x, kind: x.to(kind), torch.float32, torch.float64)
    check_arguments(lambda x, values: x * values["a"], types.MappingProxyType({"a": 1}), types.MappingProxyType({"a": 2}))
    check_arguments(lambda x, values: x * values["a"], collections.ChainMap({"a": 1}), collections.ChainMap({}, {"a": 2}))
    check_arguments(lambda x, values: x * values["a"], collections.Counter("aab"), collections.Counter("aaab"))


def test_changed_bytearray() -> None:
    data = bytearray(b"\x02")
    check(lambda x: x * data[0], lambda: data.__setitem__(0, 3))


def loss_fn(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def test_redefined_global(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return loss_fn(x)

    check(function, lambda: monkeypatch.setitem(globals(), "loss_fn", lambda x: x * 3))


def test_replaced_code() -> None:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def outer(x: torch.Tensor) -> torch.Tensor:
        return inner(x)

    check(outer, lambda: setattr(inner, "__code__", (lambda x: x * 3).__code__))


class Net(nn.Module):
    scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.helper(x) * self.scale

    def helper(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def shift() -> float:
        return 1.0

    @classmethod
    def doubled(cls) -> float:
        return cls.scale * 2


def test_changed_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()

    class Sub(Net):
        pass

    sub = Sub()
    check(
        lambda x: net(x) + net.shift() + sub(x) * Sub.doubled(),
        lambda: monkeypatch.setattr(Net, "forward", lambda self, x: self.helper(x) * 5),
        lambda: monkeypatch.setattr(Net, "helper", lambda self, x: x * 7),
        lambda: monkeypatch.setattr(Net, "shift", staticmethod(lambda: 4.0)),
        lambda: monkeypatch.setattr(Net, "doubled", classmethod(lambda cls: 9.0)),
        lambda: monkeypatch.setattr(Net, "scale", 3.0),
        lambda: monkeypatch.setattr(Sub, "scale", 4.0, raising=False),
        lambda: monkeypatch.setattr(Sub, "forward", lambda self, x: x, raising=False),
        lambda: setattr(net, "helper", lambda x: x * 11),
        lambda: setattr(sub, "__class__", Net),
        lambda: net.register_forward_hook(lambda module, args, out: out * 2),
    )


def test_changed_partials() -> None:
    def scaled(x: torch.Tensor, factor: float, shift: float = 0.0) -> torch.Tensor:
        return x * factor + shift

    holder = {"function": functools.partial(scaled, factor=2.0)}
    check(
        lambda x: holder["function"](x),
        lambda: holder.update(function=functools.partial(scaled, factor=3.0)),
        lambda: holder.update(function=functools.partial(scaled, factor=3.0, shift=1.0)),
        lambda: holder["function"].keywords.update(shift=2.0),
        lambda: holder.update(function=functools.partial(lambda x, factor: x - factor, factor=3.0)),
    )
    check_arguments(lambda x, function: function(x), functools.partial(scaled, factor=2.0), functools.partial(scaled, factor=3.0))


def test_wrappers_defaults_and_closures() -> None:
    def make_function(factor: float) -> Callable[..., torch.Tensor]:
        @functools.wraps(loss_fn)
        def wrapped(x: torch.Tensor, shift: float = 1.0, *, more: float = 0.0) -> torch.Tensor:
            return x * factor + shift + more

        return wrapped

    functions = [make_function(2.0)]
    check(
        lambda x: functions[0](x),
        lambda: functions.__setitem__(0, make_function(3.0)),
        lambda: setattr(functions[0], "__defaults__", (5.0,)),
        lambda: functions[0].__kwdefaults__.update(more=7.0),
        lambda: functions.insert(0, make_function(4.0)),
    )


def test_closures_below_decorators_of_torch() -> None:
    scale = {"factor": 2.0}

    def make_helper(shift: float) -> Callable[[torch.Tensor], torch.Tensor]:
        @torch.no_grad()
        def helper(x: torch.Tensor) -> torch.Tensor:
            return x * scale["factor"] + shift

        return helper

    helpers = [make_helper(1.0)]
    check(lambda x: helpers[0](x), lambda: scale.update(factor=3.0), lambda: helpers.__setitem__(0, make_helper(2.0)))


def test_patched_functions_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.Linear(6, 6)
    check(
        lambda x: F.mse_loss(layer(x), x),
        lambda: monkeypatch.setattr(F, "mse_loss", lambda one, other: (one - other).abs().sum()),
        lambda: monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x * 2),
    )


@pytest.mark.parametrize("change", ["reference", "lock"])
def test_unused_objects_need_not_be_comparable(change: str) -> None:
    """Many scripts have such objects."""

    class Thing:
        def __init__(self) -> None:
            self.factor, self.lock, self.progress = 2.0, threading.Lock(), iter([1])
            self.reference = weakref.ref(nn.Linear(1, 1))

    thing = Thing()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * thing.factor

    _, observation = observe(function, (X,), {})
    assert observation.is_pure
    graph = walk({"step": function}, None, observation.executed_code)
    assert not graph.incomparable
    setattr(thing, change, None)
    assert graph.is_unchanged()
    thing.factor = 3.0
    assert not graph.is_unchanged()


@pytest.mark.parametrize(
    "kind", [threading.Lock, lambda: iter([1]), lambda: np.random.default_rng(0), lambda: (i for i in ()), lambda: itertools.count()]
)
def test_used_objects_that_are_incomparable(kind: Callable[[], Any]) -> None:
    thing = {"thing": kind()}

    def function() -> bool:
        return thing["thing"] is None

    _, observation = observe(function, (), {})
    assert list(walk({"step": function}, None, observation.executed_code).incomparable) == ["thing['thing']"]


def test_changed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAXLA_TEST", "1")
    monkeypatch.setattr(sys, "argv", ["one"])

    def function() -> str:
        return os.environ["DYNAXLA_TEST"] + sys.argv[0]

    _, observation = observe(function, (), {})
    assert observation.is_pure
    for change in (lambda: monkeypatch.setenv("DYNAXLA_TEST", "2"), lambda: sys.argv.__setitem__(0, "two")):
        graph = walk({"step": function}, None, observation.executed_code)
        assert graph.is_unchanged()
        assert not graph.incomparable
        change()
        assert not graph.is_unchanged()


class Pair:
    __match_args__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 2.0


pair = Pair()
FORMAT = "{0.factor}"
read_factor = operator.attrgetter("factor")


def by_match() -> float:
    match pair:
        case Pair(value):
            return value
    return 0.0


@pytest.mark.parametrize("function", [lambda: read_factor(pair), lambda: f"{pair.factor}", lambda: FORMAT.format(pair), by_match])
def test_attributes_that_code_reads_without_naming_them(function: Callable[[], Any]) -> None:
    pair.factor = 2.0
    _, observation = observe(function, (), {})
    graph = walk({"step": function}, None, observation.executed_code)
    assert graph.is_unchanged()
    pair.factor = 3.0
    assert not graph.is_unchanged()
    assert graph.facts() != walk({"step": function}, None, observation.executed_code).facts()


def test_reflection_reads_all_attributes() -> None:
    thing = types.SimpleNamespace(factor=2.0, lock=threading.Lock())

    def by_name(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(thing, "factor", 0)

    def by_variable(x: torch.Tensor, name: str = "factor") -> torch.Tensor:
        return x * getattr(thing, name)

    for function, expected in ((by_name, []), (by_variable, ["thing.lock"])):
        _, observation = observe(function, (X,), {})
        assert list(walk({"step": function}, None, observation.executed_code).incomparable) == expected


def test_cached_functions() -> None:
    """The entries of an lru_cache cannot be read; torch's own caches are trusted."""
    cached = functools.lru_cache(lambda x: x + 1)

    def function() -> int:
        return cached(1)

    _, observation = observe(function, (), {})
    assert list(walk({"step": function}, None, observation.executed_code).incomparable) == ["cached"]


def test_code_that_no_walk_finds_is_reported() -> None:
    def step() -> torch.Tensor:
        return torch.ops.surroundings.hidden(X)

    with torch.library._scoped_library("surroundings", "FRAGMENT") as library:
        library.define("hidden(Tensor x) -> Tensor")
        library.impl("hidden", lambda x: x * 2, "CPU")
        _, observation = observe(step, (), {})
    assert len(walk({"step": step}, None, observation.executed_code).unreached(observation.executed_code)) == 1


SCRIPT = """
import torch, dynaxla
factor = 2.0
class Net:
    def __call__(self, x):
        return x * factor
net = Net()
@dynaxla.compile_step
def step(x):
    return net(x)
x = torch.ones(3)
def check(step, value):
    for _ in range(4):
        assert step(x).tolist() == [value] * 3
check(step, 2.0)
factor = 3.0
check(step, 3.0)
def loss(x): return x * 2
@dynaxla.compile_step
def train(x): return loss(x)
check(train, 2.0)
def loss(x): return x * 5
check(train, 5.0)
Net.__call__ = lambda self, x: x * 7
check(step, 7.0)
print("right", dynaxla.metrics.snapshot()["steps"])
"""


def test_main_module_without_a_file() -> None:
    assert run_script(SCRIPT) == "right 7\n"


@pytest.mark.parametrize("name", ["__main__", "cell", None])
def test_cells_of_a_notebook(name: str | None) -> None:
    space: dict[str, Any] = {} if name is None else {"__name__": name}

    numbers = itertools.count(1)

    def cell(text: str) -> None:
        exec(compile(textwrap.dedent(text), f"<cell {next(numbers)}>", "exec"), space)

    cell("""
        import torch, dynaxla
        factor = 2.0
        def loss(x): return x * 2
        class Net:
            def __call__(self, x): return loss(x) * factor
        net = Net()
        step = dynaxla.compile_step(lambda x: net(x))
    """)
    x = torch.ones(2)
    metrics.reset()
    for text, value in (("", 4.0), ("factor = 3.0", 6.0), ("def loss(x): return x * 5", 15.0)):
        cell(text)
        for _ in range(6):
            assert space["step"](x).tolist() == [value] * 2
    assert metrics.snapshot()["steps"] > 8
    cell("class Net:\n    def __call__(self, x): return x * 7\nnet = Net()")
    assert space["step"](x).tolist() == [7.0] * 2
    cell("Net.__call__ = lambda self, x: x * 9")
    assert space["step"](x).tolist() == [9.0] * 2


def test_identities_are_not_reused() -> None:
    """An object that is compared by identity is kept alive, so that no other object gets its address."""
    for hold in (lambda lock: lock, lambda lock: {"lock": lock}):
        facts = set()
        for _ in range(50):
            holder = hold(threading.Lock())
            fact = walk({"step": holder}).facts()["step"]
            assert fact == walk({"step": holder}).facts()["step"]
            facts.add(tuple(fact))
            del holder
        assert len(facts) == 50


def changes_of_state() -> Iterator[tuple[str, ObjectGraph, Callable[[], None]]]:
    tensor, other = torch.ones(2, requires_grad=True), torch.ones(2)
    yield "hook", walk({"x": tensor}), lambda: tensor.register_hook(lambda grad: grad * 2) and None
    tensor = torch.ones(2, requires_grad=True)
    yield "accumulation hook", walk({"x": tensor}), lambda: tensor.register_post_accumulate_grad_hook(lambda _: None) and None
    yield "attribute", walk({"x": other}), lambda: setattr(other, "scale", 2)
    pair = [torch.ones(2), torch.ones(2)]
    yield "shared", walk({"x": pair}), lambda: setattr(pair[0], "data", pair[1])
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * 2
    yield "leaf", walk({"x": product}), lambda: str(product.detach_().requires_grad_())
    array = np.ones(2)
    yield "array", walk({"x": array}), lambda: array.__setitem__(0, 2)
    order = collections.OrderedDict(a=1, b=2)
    yield "order", walk({"x": order}), lambda: order.move_to_end("a")
    names = {"a": Net, "b": 1}
    yield "key", walk({"x": names}), lambda: names.update(c=names.pop("b"))
    factory = collections.defaultdict(int)
    yield "factory", walk({"x": factory}), lambda: setattr(factory, "default_factory", float)

    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    yield "context variable", walk({"x": variable}), lambda: str(variable.set(1))

    class Slots:
        __slots__ = ("a", "b")

    slots = Slots()
    slots.a = 1
    yield "slot", walk({"x": slots}), lambda: setattr(slots, "a", 2)
    yield "new slot", walk({"x": slots}), lambda: setattr(slots, "b", 2)
    moved = Slots()
    moved.a = 1
    yield "another slot", walk({"x": moved}), lambda: setattr(moved, "b", vars(Slots)["a"].__get__(moved)) or delattr(moved, "a")
    counter = collections.Counter(a=1)
    yield "key of a subclass", walk({"x": counter}), lambda: counter.update(b=counter.pop("a"))
    logger = logging.getLogger("a logger of this test")
    yield "level", walk({"x": logger}), lambda: logger.setLevel(logging.DEBUG)
    child = logger.getChild("child")
    yield "level of the parent", walk({"x": child}), lambda: logger.setLevel(logging.ERROR)
    net = Net()
    yield "dict", walk({"x": net}), lambda: setattr(net, "__dict__", dict(net.__dict__, other=1))
    handle = nn.modules.module.register_module_forward_hook
    yield "global hook", walk({"x": net}), lambda: handles.append(handle(lambda *_: None))


handles: list[Any] = []


def test_changes_are_noticed() -> None:
    try:
        for name, graph, change in changes_of_state():
            facts = graph.facts()
            assert graph.is_unchanged(), name
            assert walk(graph.roots).facts() == facts, name
            change()
            assert not graph.is_unchanged(), name
            assert walk(graph.roots).facts() != facts, name
    finally:
        for handle in handles:
            handle.remove()


def test_generators_are_compared_by_identity() -> None:
    generators = [torch.Generator(), torch.Generator()]
    holder = {"generator": generators[0]}
    before = walk({"x": holder})
    torch.rand(1, generator=generators[0])
    assert before.is_unchanged()
    holder["generator"] = generators[1]
    assert not before.is_unchanged()
    assert before.facts() != walk({"x": holder}).facts()


def test_items_of_keys_are_facts() -> None:
    """The path of a key that is a tuple has its position in the dict, and not its items."""
    first, second = ({(1, number): "value"} for number in (2, 3))
    assert walk({"x": first}).facts() != walk({"x": second}).facts()
