"""The registry of lowerings: ATen overload -> JAX function.

    @lowers(aten.cumsum.default)
    def cumsum(x, dim, *, dtype=None): ...

A lowering receives the op's arguments as the schema orders them: positional ones by position, keyword-only ones by name. Tensors come
as `jax.Array` (tracers), dtypes as NumPy dtypes, sizes as ints. It may leave out keyword-only arguments that cannot change the values
(`layout`, `device`, `pin_memory`, `memory_format`, `non_blocking`) or that it does not support: an unsupported one with another value
than its default is an `UnsupportedOp`. A parameter named `ctx` receives the `Context`.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch.fx import Node

from .. import forks
from ..errors import UnsupportedOp
from ..runtime import private
from ..torch_ops import MissingOp
from . import dtypes
from .promotion import Promotion, elementwise

Lowering = Callable[..., Any]
Function = TypeVar("Function", bound=Lowering)

# Arguments that say where or how a result is stored. Results are placed and laid out by the runtime, so lowerings need not know them.
STORAGE_ARGUMENTS = frozenset({"layout", "device", "pin_memory", "memory_format", "non_blocking"})


@dataclass(frozen=True)
class Rule:
    """One registered lowering.

    Attributes: op; function; platforms (JAX's names: "cpu", "cuda", "rocm", "tpu"; empty means all); takes_context; where (its place); by
    (the module that registered it).
    """

    op: OpOverload
    function: Lowering
    platforms: tuple[str, ...]
    takes_context: bool
    where: str
    by: str
    _positional: int = field(repr=False, default=0)
    _keywords: frozenset[str] = field(repr=False, default=frozenset())

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arrange a node's arguments for the function.

        Raises: UnsupportedOp if an argument that the lowering leaves out has another value than its default.
        """
        positional: list[Any] = []
        keywords: dict[str, Any] = {}
        for index, argument in enumerate(self.op._schema.arguments):
            if index < len(args):
                value = args[index]
            elif argument.name in kwargs:
                value = kwargs[argument.name]
            else:
                value = argument.default_value
            if isinstance(value, torch.dtype):
                if not dtypes.is_supported(value):
                    raise UnsupportedOp(f"{self.op} with {argument.name}={value}: JAX has no such dtype", op=str(self.op))
                value = dtypes.to_jax(value)
            if argument.kwarg_only:
                if argument.name in self._keywords:
                    keywords[argument.name] = value
                    continue
            elif index < self._positional:
                positional.append(value)
                continue
            if value != argument.default_value and argument.name not in STORAGE_ARGUMENTS:
                raise UnsupportedOp(
                    f"{self.op} is supported only with {argument.name}={argument.default_value}, not {value!r}",
                    op=str(self.op),
                )
        return positional, keywords


def _parameters(op: OpOverload, function: Lowering) -> tuple[int, frozenset[str], bool]:
    """How many positional arguments `function` takes, which keyword-only ones, and whether it takes the context."""
    schema = op._schema.arguments
    keyword_only = {argument.name for argument in schema if argument.kwarg_only}
    available = sum(not argument.kwarg_only for argument in schema)
    positional, keywords, takes_context = 0, set(), False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "ctx":
            takes_context = True
        elif parameter.kind is parameter.VAR_POSITIONAL:
            positional = available
        elif parameter.kind is parameter.VAR_KEYWORD:
            keywords |= keyword_only
        elif parameter.kind is parameter.KEYWORD_ONLY:
            if parameter.name not in keyword_only:
                raise TypeError(f"lowering of {op}: the schema has no keyword-only argument {parameter.name!r}: {op._schema}")
            keywords.add(parameter.name)
        else:
            positional += 1
    if positional > available:
        raise TypeError(f"lowering of {op} takes {positional} positional arguments, the schema has {available}: {op._schema}")
    return positional, frozenset(keywords), takes_context


@dataclass(frozen=True)
class _Named:
    """A lowering of an op that is known by its name alone. Attributes: function; platforms, where, by (as in `Rule`)."""

    function: Lowering
    platforms: tuple[str, ...]
    where: str
    by: str


# Modules whose lowerings are known by the hash of dynaxla's sources.
_OWN = "dynaxla."


class Registry:
    """Lowerings by overload and platform. A platform's own lowering goes before the general one, an overload's before its name's.

    load: what registers dynaxla's own lowerings. It is called when a lowering is looked for, or one of others is registered: importing
    them takes longer than all else that a later process needs for a program that it finds compiled.
    """

    def __init__(self, load: Callable[[], object] | None = None) -> None:
        self._load = load
        self._is_loading = False
        self._lock = forks.lock()
        self._rules: dict[tuple[OpOverload, str | None], Rule] = {}
        self._named: dict[tuple[str, str | None], _Named] = {}
        self._bound: dict[tuple[OpOverload, _Named], Rule | None] = {}
        self._holding: dict[OpOverload, Callable[[Node], Any]] = {}

    def fill(self) -> None:
        """Register dynaxla's own lowerings, once. After a failure, the next call tries again, and fails in the same way if nothing has
        changed: nothing of a module that did not load is left in the registry."""
        if self._load is None:
            return
        with self._lock:
            if self._load is None or self._is_loading:  # the imported modules look for lowerings, too
                return
            self._is_loading = True
            try:
                self._load()
                self._load = None
            except BaseException:
                self._forget_unloaded_modules()
                raise
            finally:
                self._is_loading = False

    def _forget_unloaded_modules(self) -> None:
        """Remove the lowerings of dynaxla's modules whose import has failed: Python runs these modules from their start again."""

        def is_kept(lowering: Rule | _Named) -> bool:
            return not lowering.by.startswith(_OWN) or lowering.by in sys.modules

        self._rules = {key: rule for key, rule in self._rules.items() if is_kept(rule)}
        self._named = {key: named for key, named in self._named.items() if is_kept(named)}

    def register(
        self, op: OpOverload, function: Lowering, platforms: Iterable[str] = (), source: Lowering | None = None, by: str | None = None
    ) -> None:
        """Add a lowering for one overload, unless the installed torch does not have it.

        source: the function whose place is reported, if not this one. by: the module that registers it, if not the caller.

        Raises: ValueError if the op has such a lowering already; TypeError if the function does not fit the op's schema.
        """
        if isinstance(op, MissingOp):
            return
        platforms, by = tuple(platforms), by or _caller()
        if not by.startswith(_OWN):
            self.fill()
        rule = _rule(op, function, platforms, _place(source or function), by)
        for platform in platforms or (None,):
            if earlier := self._rules.get((op, platform)):
                raise ValueError(f"{op} has two lowerings for {platform or 'all platforms'}: at {earlier.where} and at {rule.where}")
            self._rules[op, platform] = rule

    def hold(self, op: OpOverload, find: Callable[[Node], Any]) -> None:
        """What a node of this op only names in its arguments: whoever keeps the graph keeps it alive. find: gives it."""
        self._holding[op] = find

    def held(self, node: Node) -> Any:
        """What is to be kept alive for a node; None for most."""
        find = self._holding.get(node.target) if isinstance(node.target, OpOverload) else None
        return None if find is None else find(node)

    def register_name(self, name: str, function: Lowering, platforms: Iterable[str] = (), by: str | None = None) -> None:
        """For an op of another library, which may not exist yet, as "namespace::name": for all its overloads whose schema it fits.

        by: as of `register`.

        Raises: ValueError if the name has such a lowering already.
        """
        by = by or _caller()
        if not by.startswith(_OWN):
            self.fill()
        named = _Named(function, tuple(platforms), _place(function), by)
        for platform in named.platforms or (None,):
            if earlier := self._named.get((name, platform)):
                raise ValueError(f"{name} has two lowerings for {platform or 'all platforms'}: at {earlier.where} and at {named.where}")
            self._named[name, platform] = named

    def find(self, op: OpOverload, platform: str | None = None) -> Rule | None:
        """The lowering of an overload for a platform; None if there is none.

        Raises: TypeError if the op has a lowering by its name, which fits none of its overloads.
        """
        self.fill()
        if isinstance(op, MissingOp):
            return None
        if rule := self._rules.get((op, platform)) or self._rules.get((op, None)):
            return rule
        for place in (platform, None):
            named = self._named.get((op._schema.name, place))
            if named is not None and (rule := self._bind(op, named)) is not None:
                return rule
        return None

    def _bind(self, op: OpOverload, named: _Named) -> Rule | None:
        """The rule for one of the overloads of a name; None if the lowering does not fit this one, but another."""
        key = op, named
        if key not in self._bound:
            rule, refusal = _try_rule(op, named)
            if refusal is not None and not any(_try_rule(other, named)[0] for other in _overloads(op)):
                raise refusal
            self._bound[key] = rule  # whoever else comes here at the same time puts an equal one
        return self._bound[key]

    def places(self) -> list[str] | None:
        """Which op has from where a lowering that others have registered: dynaxla's sources say which it registers itself.

        None if one of them is from elsewhere than dynaxla and JAX, whose versions say what it does.
        """
        found = [(str(op), platform, rule.where, rule.by) for (op, platform), rule in list(self._rules.items())]
        found += [(name, platform, lowering.where, lowering.by) for (name, platform), lowering in list(self._named.items())]
        others = [(op, platform, where) for op, platform, where, by in found if not by.startswith(_OWN)]
        if any(where.partition(":")[0].partition(".")[0] not in ("dynaxla", "jax") for _, _, where in others):
            return None
        return sorted(f"{op} {platform} {where}" for op, platform, where in others)

    def __len__(self) -> int:
        self.fill()
        return len(self._rules) + len(self._named)

    def ops(self) -> set[OpOverload]:
        """Every overload that has a lowering on some platform, of those ops that exist."""
        self.fill()
        named = {op for (name, _), lowering in list(self._named.items()) for op in _existing(name) if self._bind(op, lowering) is not None}
        return {op for op, _ in list(self._rules)} | named


def _rule(op: OpOverload, function: Lowering, platforms: tuple[str, ...], where: str, by: str) -> Rule:
    positional, keywords, takes_context = _parameters(op, function)
    return Rule(op, function, platforms, takes_context, where, by, positional, keywords)


def _try_rule(op: OpOverload, named: _Named) -> tuple[Rule | None, TypeError | None]:
    try:
        return _rule(op, named.function, named.platforms, named.where, named.by), None
    except TypeError as error:
        return None, error


def _place(function: Lowering) -> str:
    """Where a function is written, as module:line."""
    code = inspect.unwrap(function)
    return f"{getattr(inspect.getmodule(code), '__name__', '?')}:{getattr(getattr(code, '__code__', None), 'co_firstlineno', '?')}"


def _caller() -> str:
    """The module that has called the function that calls this one."""
    return str(sys._getframe(2).f_globals.get("__name__"))


def _overloads(op: OpOverload) -> list[OpOverload]:
    packet = op.overloadpacket
    return [getattr(packet, overload) for overload in packet.overloads()]


def _existing(name: str) -> list[OpOverload]:
    """The overloads of an op that is known by its name; none if it does not exist (yet)."""
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


def _load() -> None:
    """Raises: UnsupportedVersion for a failure with releases of torch or JAX that are newer than the tested ones."""
    try:
        importlib.import_module(".ops", __package__).load()
    except Exception as error:
        if not private.newer_than_known():
            raise
        raise private.unsupported(f"dynaxla's lowerings do not load ({type(error).__name__}: {error})") from error


registry = Registry(_load)


def lowers(*ops: OpOverload | str, platforms: Iterable[str] = (), promote: Promotion | None = None) -> Callable[[Function], Function]:
    """Register a function as the lowering of `ops`: overloads, or names ("namespace::name") of ops that another library may define later.

    A name stands for all the op's overloads whose schema the function fits, and that have no lowering of their own.

    With `promote`, every positional argument is an operand: the function gets arrays of one dtype and one shape (ATen's promotion and
    broadcasting), and its result is cast to the promoted result dtype.
    """

    by = _caller()

    def decorate(function: Function) -> Function:
        for op in ops:
            if isinstance(op, str):
                if promote:
                    raise TypeError(f"{op}: promotion needs the op's schema, so give the overload instead of its name")
                registry.register_name(op, function, platforms, by)
                continue
            registry.register(op, _promoting(function, promote) if promote else function, platforms, function, by)
        return function

    return decorate


def lower_table(table: Mapping[OpOverload, Lowering], promote: Promotion | None = None) -> None:
    """Register one-line lowerings: a table from overloads to functions. `promote`: as of `lowers`."""
    by = _caller()
    for op, function in table.items():
        registry.register(op, _promoting(function, promote) if promote else function, source=function, by=by)


def _promoting(function: Lowering, kind: Promotion) -> Lowering:
    def lowering(*operands: Any) -> Any:
        return elementwise(function, operands, kind)

    lowering.__doc__ = function.__doc__
    return lowering
