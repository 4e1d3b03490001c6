"""Places from which a function may read a value: containers, attributes, defaults, cells, partials, methods and modules, also nested."""

from __future__ import annotations

import collections
import functools
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .choices import Choices
from .leaves import LEAVES, Leaf

Space = dict[str, Any]
Change = tuple[str, Callable[[], Any]]
Replace = Callable[[Any], None]
_names = itertools.count()


@dataclass
class Readable:
    """A value that a function can read.

    Attributes:
        value: the value.
        read: takes an expression for the value, and returns an expression for a number.
        changes: takes a function that replaces the value, and returns possible changes.
    """

    value: Any
    read: Callable[[str], str]
    changes: Callable[[Replace], list[Change]]


@dataclass
class Maker:
    """Makes values and places in one namespace, as the cells of a notebook do."""

    choices: Choices
    space: Space = field(default_factory=lambda: {"__name__": "cell", "functools": functools, "torch": torch})

    def make(self, depth: int) -> Readable:
        if depth == 0:
            return self._leaf()
        return self.choices.among(_PLACES)(self, self.make(depth - self.choices.integer(1, 2) if depth > 1 else 0))

    def _leaf(self) -> Readable:
        name = self.choices.among(list(LEAVES))
        leaf: Leaf = LEAVES[name]
        first = self.choices.integer(0, 9)
        other = leaf.make((first + self.choices.integer(1, 9)) % 11)
        value = leaf.make(first)

        def changes(replace: Replace) -> list[Change]:
            return [(f"another {name}", lambda: replace(other)), *((f"{name} inside", change) for change in _inside(value, other))]

        return Readable(value, lambda expression: leaf.read.replace("VALUE", f"({expression})"), changes)

    def run(self, text: str) -> Any:
        """Runs a definition of NAME, which is replaced by an unused name. Returns the defined object."""
        name = f"name_{next(_names)}"
        exec(text.replace("NAME", name), self.space)
        return self.space[name]


def _inside(value: Any, other: Any) -> list[Callable[[], Any]]:
    """Returns functions that make a value equal to another value of its kind in place."""
    if isinstance(value, (bytearray, list)):
        return [lambda: value.__setitem__(slice(None), other)]
    if isinstance(value, collections.ChainMap):
        return [lambda: value.maps.__setitem__(1, other.maps[1])]
    if isinstance(value, (dict, set)):
        return [lambda: (value.clear(), value.update(other)), *_factory(value, other)]
    if isinstance(value, collections.deque):
        return [lambda: (value.clear(), value.extend(other))]
    if isinstance(value, types.SimpleNamespace):
        return [lambda: vars(value).update(vars(other))]
    if isinstance(value, torch.Tensor):
        return [lambda: setattr(value, "data", other.data), lambda: value.requires_grad_(other.requires_grad)]
    if type(value).__name__ in ("ndarray", "array"):
        return [lambda: value.__setitem__(slice(None), other[:])]
    return []


def _factory(value: Any, other: Any) -> list[Callable[[], Any]]:
    if isinstance(value, collections.defaultdict):
        return [lambda: setattr(value, "default_factory", other.default_factory)]
    return []


_PLACES: list[Callable[[Maker, Readable], Readable]] = []


def place(function: Callable[[Maker, Readable], Readable]) -> Callable[[Maker, Readable], Readable]:
    _PLACES.append(function)
    return function


@place
def in_a_dict(maker: Maker, inner: Readable) -> Readable:
    value = {"key": inner.value, "other": 1}

    def changes(replace: Replace) -> list[Change]:
        renamed = ("renamed", lambda: value.__setitem__("another", value.pop("other")))
        return [*inner.changes(lambda new: value.__setitem__("key", new)), renamed]

    return Readable(value, lambda e: "(" + inner.read(f"{e}['key']") + f") + len(str(list({e})))", changes)


@place
def alone_in_a_subclass_of_dict(maker: Maker, inner: Readable) -> Readable:
    value = maker.run(maker.choices.among(["class NAME(dict): pass", "class NAME(__import__('collections').Counter): pass"]))(
        key=inner.value
    )

    def changes(replace: Replace) -> list[Change]:
        renamed = ("renamed", lambda: value.__setitem__("another", value.pop("key")))
        return [*inner.changes(lambda new: value.__setitem__("key", new)), renamed]

    return Readable(value, lambda e: "(" + inner.read(f"next(iter({e}.values()))") + f") + len(str(list({e})))", changes)


@place
def in_an_ordered_dict(maker: Maker, inner: Readable) -> Readable:
    value = collections.OrderedDict(key=inner.value, other=1)

    def changes(replace: Replace) -> list[Change]:
        moved = ("order", lambda: value.move_to_end("key"))
        renamed = ("renamed", lambda: value.__setitem__("another", value.pop("other")))
        return [*inner.changes(lambda new: value.__setitem__("key", new)), moved, renamed]

    def read(expression: str) -> str:
        inside = inner.read(f"{expression}['key']")
        return f"({inside}) + 100 * list({expression}).index('key') + len(str(list({expression})))"

    return Readable(value, read, changes)


@place
def in_a_list(maker: Maker, inner: Readable) -> Readable:
    value = [0, inner.value]

    def changes(replace: Replace) -> list[Change]:
        return [*inner.changes(lambda new: value.__setitem__(1, new)), ("appended", lambda: value.append(1))]

    return Readable(value, lambda e: f"({inner.read(f'{e}[1]')}) + len({e})", changes)


@place
def in_a_tuple(maker: Maker, inner: Readable) -> Readable:
    value = (0, inner.value)
    return Readable(value, lambda e: inner.read(f"{e}[1]"), lambda replace: inner.changes(lambda new: replace((0, new))))


@place
def in_an_object(maker: Maker, inner: Readable) -> Readable:
    kind = maker.run("class NAME:\n    def __init__(self): self.other = 1")
    like = maker.run("class NAME:\n    other = property(lambda self: 5)\n    def __init__(self): self.__dict__['other'] = 1")
    value = kind()
    value.inner = inner.value

    def changes(replace: Replace) -> list[Change]:
        def copied() -> None:
            value.__dict__ = dict(value.__dict__, other=2)

        return [
            *inner.changes(lambda new: setattr(value, "inner", new)),
            ("another class", lambda: setattr(value, "__class__", like)),
            ("another dict", copied),
        ]

    return Readable(value, lambda e: f"({inner.read(f'{e}.inner')}) + {e}.other", changes)


@place
def in_slots(maker: Maker, inner: Readable) -> Readable:
    value = maker.run("class NAME:\n    __slots__ = ('inner', 'one', 'other')")()
    value.inner = inner.value
    value.one = 3

    def moved() -> None:
        value.other = value.one
        del value.one

    def changes(replace: Replace) -> list[Change]:
        filled = ("a new slot", lambda: setattr(value, "other", 3))
        return [*inner.changes(lambda new: setattr(value, "inner", new)), filled, ("another slot", moved)]

    return Readable(value, lambda e: f"({inner.read(f'{e}.inner')}) + getattr({e}, 'one', 0) + 10 * getattr({e}, 'other', 0)", changes)


@place
def in_an_attribute_of_a_function(maker: Maker, inner: Readable) -> Readable:
    """The function is not called."""
    value = maker.run("def NAME(): pass")
    value.inner = inner.value

    def changes(replace: Replace) -> list[Change]:
        return [*inner.changes(lambda new: setattr(value, "inner", new)), ("a new attribute", lambda: setattr(value, "other", 3))]

    return Readable(value, lambda e: f"({inner.read(f'{e}.inner')}) + getattr({e}, 'other', 0)", changes)


@place
def in_a_module_of_torch(maker: Maker, inner: Readable) -> Readable:
    value = torch.nn.Identity()
    value.inner = [inner.value]  # a module would be its child

    def changes(replace: Replace) -> list[Change]:
        return [*inner.changes(lambda new: value.inner.__setitem__(0, new)), ("eval", value.eval)]

    return Readable(value, lambda e: f"({inner.read(f'{e}.inner[0]')}) + {e}.training", changes)


@place
def in_a_default(maker: Maker, inner: Readable) -> Readable:
    value = maker.run(f"def NAME(value=None): return {inner.read('value')}")
    value.__defaults__ = (inner.value,)
    other = maker.run("def NAME(value=None): return 123")

    def changes(replace: Replace) -> list[Change]:
        return [
            *inner.changes(lambda new: setattr(value, "__defaults__", (new,))),
            ("code", lambda: setattr(value, "__code__", other.__code__)),
            ("function", lambda: replace(other)),
        ]

    return Readable(value, lambda e: f"{e}()", changes)


@place
def in_a_keyword_default(maker: Maker, inner: Readable) -> Readable:
    value = maker.run(f"def NAME(*, value=None): return {inner.read('value')}")
    value.__kwdefaults__ = {"value": inner.value}

    def changes(replace: Replace) -> list[Change]:
        inside = inner.changes(lambda new: value.__kwdefaults__.update(value=new))
        return [*inside, *inner.changes(lambda new: setattr(value, "__kwdefaults__", {"value": new}))]

    return Readable(value, lambda e: f"{e}()", changes)


@place
def in_a_cell(maker: Maker, inner: Readable) -> Readable:
    value = maker.run(f"def NAME(value):\n    return lambda: {inner.read('value')}")(inner.value)
    other = maker.run("NAME = lambda value: lambda: (value, 77)[1]")(0)

    def changes(replace: Replace) -> list[Change]:
        return [*inner.changes(lambda new: setattr(value.__closure__[0], "cell_contents", new)), ("function", lambda: replace(other))]

    return Readable(value, lambda e: f"{e}()", changes)


@place
def in_a_partial(maker: Maker, inner: Readable) -> Readable:
    function = maker.run(f"def NAME(value, more=0): return ({inner.read('value')}) + more")
    other = maker.run("def NAME(value, more=0): return 55 + more")
    by_keyword = bool(maker.choices.integer(0, 1))

    def partial_of(new: Any, function: Any = function) -> Any:
        return functools.partial(function, value=new) if by_keyword else functools.partial(function, new)

    value = partial_of(inner.value)

    def changes(replace: Replace) -> list[Change]:
        replaced = [
            *inner.changes(lambda new: replace(partial_of(new))),
            ("function of a partial", lambda: replace(partial_of(inner.value, other))),
        ]
        return [*replaced, ("keywords of a partial", lambda: value.keywords.update(more=9))]

    return Readable(value, lambda e: f"{e}()", changes)


@place
def behind_wrappers(maker: Maker, inner: Readable) -> Readable:
    text = f"def NAME(value):\n    def wrapped(): return {inner.read('value')}\n    return functools.wraps(len)(wrapped)"
    function = maker.run(text)(inner.value)
    value = maker.run("def NAME(function):\n    @functools.wraps(function)\n    def wrapper(): return function()\n    return wrapper")(
        function
    )
    value.scale = 1

    def changes(replace: Replace) -> list[Change]:
        found = inner.changes(lambda new: setattr(function.__closure__[0], "cell_contents", new))
        return [*found, ("attribute of a function", lambda: setattr(value, "scale", 4))]

    return Readable(value, lambda e: f"{e}() + {e}.scale", changes)


def _methods(maker: Maker, inner: Readable, signature: str, expression: str, wrap: Callable[[Any], Any]) -> Readable:
    kind = maker.run(f"class NAME:\n    inner = None\n    {signature}: return {inner.read(expression)}")
    kind.inner = (inner.value,)  # a function would become a method
    if "self" not in signature and "cls" not in signature:
        kind.method = wrap(maker.run(f"def NAME(value=None): return {inner.read('value')}"))
        kind.__dict__["method"].__func__.__defaults__ = (inner.value,)
    sub = type("Sub", (kind,), {"__module__": "cell"})
    value = (sub if maker.choices.integer(0, 1) else kind)()
    other = maker.run("def NAME(*args): return 99")

    def put(new: Any) -> None:
        kind.inner = (new,)
        if "self" not in signature and "cls" not in signature:
            kind.__dict__["method"].__func__.__defaults__ = (new,)

    def changes(replace: Replace) -> list[Change]:
        found = [*inner.changes(put), ("method", lambda: setattr(kind, "method", wrap(other)))]
        if isinstance(kind.__dict__["method"], property):
            return found
        code = getattr(kind.__dict__["method"], "__func__", kind.__dict__["method"])
        return [
            *found,
            ("override", lambda: setattr(sub, "method", wrap(other))),
            ("own method", lambda: setattr(value, "method", lambda: 98)),
            ("code of a method", lambda: setattr(code, "__code__", other.__code__)),
        ]

    call = "" if wrap is property else "()"
    return Readable(value, lambda e: f"{e}.method{call}", changes)


@place
def by_a_method(maker: Maker, inner: Readable) -> Readable:
    return _methods(maker, inner, "def method(self)", "self.inner[0]", lambda function: function)


@place
def by_a_class_method(maker: Maker, inner: Readable) -> Readable:
    return _methods(maker, inner, "@classmethod\n    def method(cls)", "cls.inner[0]", classmethod)


@place
def by_a_static_method(maker: Maker, inner: Readable) -> Readable:
    return _methods(maker, inner, "@staticmethod\n    def method(value=None)", "value", staticmethod)


@place
def by_a_property(maker: Maker, inner: Readable) -> Readable:
    return _methods(maker, inner, "@property\n    def method(self)", "self.inner[0]", property)


@place
def by_a_bound_method(maker: Maker, inner: Readable) -> Readable:
    kind = maker.run(f"class NAME:\n    def method(self): return {inner.read('self.inner')}")
    value = kind()
    value.inner = inner.value
    twin = kind()

    def changes(replace: Replace) -> list[Change]:
        def other(new: Any) -> None:
            twin.inner = new
            replace(twin.method)

        return [*inner.changes(lambda new: setattr(value, "inner", new)), *inner.changes(other)]

    return Readable(value.method, lambda e: f"{e}()", changes)


@place
def by_a_metaclass(maker: Maker, inner: Readable) -> Readable:
    meta = maker.run(f"class NAME(type):\n    inner = None\n    def method(cls): return {inner.read('cls.inner[0]')}")
    meta.inner = (inner.value,)
    return Readable(
        meta("Made", (), {"__module__": "cell"}),
        lambda e: f"{e}.method()",
        lambda _: inner.changes(lambda n: setattr(meta, "inner", (n,))),
    )


@place
def by_a_descriptor(maker: Maker, inner: Readable) -> Readable:
    kind = maker.run(f"class NAME:\n    def __get__(self, owner, kind): return {inner.read('self.inner')}")
    descriptor = kind()
    descriptor.inner = inner.value
    value = type("Owner", (), {"__module__": "cell", "field": descriptor})()

    def changes(replace: Replace) -> list[Change]:
        get = maker.run("def NAME(self, owner, kind): return 31")
        return [*inner.changes(lambda new: setattr(descriptor, "inner", new)), ("descriptor", lambda: setattr(kind, "__get__", get))]

    return Readable(value, lambda e: f"{e}.field", changes)


@place
def by_calling_an_object(maker: Maker, inner: Readable) -> Readable:
    kind = maker.run(f"class NAME:\n    def __call__(self): return {inner.read('self.inner')}")
    value = kind()
    value.inner = inner.value

    def changes(replace: Replace) -> list[Change]:
        return [*inner.changes(lambda new: setattr(value, "inner", new)), ("__call__", lambda: setattr(kind, "__call__", lambda self: 21))]

    return Readable(value, lambda e: f"{e}()", changes)


@place
def by_a_global(maker: Maker, inner: Readable) -> Readable:
    name = f"global_{next(_names)}"
    maker.space[name] = inner.value
    value = maker.run(f"def NAME(): return {inner.read(name)}")
    hidden = maker.run("def NAME(): return len('abc')")

    def changes(replace: Replace) -> list[Change]:
        def shadow() -> None:
            maker.space["len"] = lambda _: 9

        return [
            *inner.changes(lambda new: maker.space.__setitem__(name, new)),
            ("shadowed builtin", shadow),
            ("other", lambda: replace(hidden)),
        ]

    return Readable(value, lambda e: f"{e}() + len('ab')", changes)


@place
def in_a_python_module(maker: Maker, inner: Readable) -> Readable:
    value = types.ModuleType("made")
    value.inner = inner.value
    value.function = maker.run("def NAME(): return 1")
    other = maker.run("def NAME(): return 2")

    def changes(replace: Replace) -> list[Change]:
        return [
            *inner.changes(lambda new: setattr(value, "inner", new)),
            ("function of a module", lambda: setattr(value, "function", other)),
        ]

    return Readable(value, lambda e: f"({inner.read(f'{e}.inner')}) + {e}.function()", changes)
