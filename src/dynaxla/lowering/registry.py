"""The registry of lowerings: ATen overload -> JAX function.

    @lowers(aten.cumsum.default)
    def cumsum(x, dim, *, dtype=None): ...

A lowering receives the op's arguments in the order of the schema: positional ones by position, keyword-only ones by name. Tensors are
passed as `jax.Array` (tracers), dtypes as NumPy dtypes, sizes as ints. A parameter named `ctx` receives the `Context`.

A lowering may omit keyword-only arguments that cannot change the values (`layout`, `device`, `pin_memory`, `memory_format`,
`non_blocking`), and arguments that it does not support. A node with a non-default value of an unsupported argument raises `UnsupportedOp`.
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

# Arguments that determine where and how a result is stored. Lowerings do not need them: the runtime places and lays out results.
STORAGE_ARGUMENTS = frozenset({"layout", "device", "pin_memory", "memory_format", "non_blocking"})


@dataclass(frozen=True)
class Rule:
    """The lowering of one overload.

    Attributes:
        op: The overload.
        function: The lowering.
        platforms: JAX's names of the lowering's platforms ("cpu", "cuda", "rocm", "tpu"); empty for all.
        takes_context: True if the function has a `ctx` parameter.
        location: The module and line of the function's definition, as module:line.
        registered_by: The module that registered the lowering.
    """

    op: OpOverload
    function: Lowering
    platforms: tuple[str, ...]
    takes_context: bool
    location: str
    registered_by: str
    _positional: int = field(repr=False, default=0)
    _keywords: frozenset[str] = field(repr=False, default=frozenset())

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Returns the positional and the keyword arguments of the function for a node.

        Raises:
            UnsupportedOp: An argument that the lowering omits has a non-default value.
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
    """Checks a lowering's signature against the op's schema.

    Returns: The number of positional arguments that `function` takes, its keyword-only arguments, and True if it takes the context.

    Raises:
        TypeError: The signature does not fit the schema.
    """
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
class _NamedLowering:
    """A lowering that is registered for an op's name instead of an overload.

    Attributes:
        function: The lowering.
        platforms, location, registered_by: As in `Rule`.
    """

    function: Lowering
    platforms: tuple[str, ...]
    location: str
    registered_by: str


# The prefix of the names of dynaxla's modules.
_OWN_PREFIX = "dynaxla."


class Registry:
    """Lowerings by overload and platform.

    A lowering for the platform takes priority over the general one, and a lowering of the overload over one of the op's name.

    Args:
        load: Registers dynaxla's own lowerings. The registry calls `load` at the first lookup, or before the first registration by another
            library. It does so no earlier: the import of the lowerings takes longer than all other work of a new process that runs a cached
            program.
    """

    def __init__(self, load: Callable[[], object] | None = None) -> None:
        self._load = load
        self._is_loading = False
        self._lock = forks.lock()
        self._rules: dict[tuple[OpOverload, str | None], Rule] = {}
        self._named: dict[tuple[str, str | None], _NamedLowering] = {}
        self._bound: dict[tuple[OpOverload, _NamedLowering], Rule | None] = {}
        self._keep_alive_by: dict[OpOverload, Callable[[Node], Any]] = {}

    def fill(self) -> None:
        """Registers dynaxla's own lowerings at the first call.

        After a failure, the next call tries again. The registry keeps no lowering of a module whose import failed: otherwise, an op would
        have two lowerings at the next call.
        """
        if self._load is None:
            return
        with self._lock:
            if self._load is None or self._is_loading:  # _is_loading: the caller is a module that is being imported
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
        """Removes the lowerings of dynaxla's modules whose import failed.

        At the next import, Python executes these modules from the start.
        """

        def is_kept(lowering: Rule | _NamedLowering) -> bool:
            return not lowering.registered_by.startswith(_OWN_PREFIX) or lowering.registered_by in sys.modules

        self._rules = {key: rule for key, rule in self._rules.items() if is_kept(rule)}
        self._named = {key: named for key, named in self._named.items() if is_kept(named)}

    def register(
        self, op: OpOverload, function: Lowering, platforms: Iterable[str] = (), source: Lowering | None = None, by: str | None = None
    ) -> None:
        """Adds a lowering for one overload, if the installed torch has the overload.

        Args:
            platforms: The platforms for which the lowering is registered; empty for the general lowering.
            source: The function whose location is reported; `function` if None.
            by: The name of the module that registers the lowering; the calling module if None.

        Raises:
            ValueError: The op already has a lowering for the platform.
            TypeError: The function does not fit the op's schema.
        """
        if isinstance(op, MissingOp):
            return
        platforms, by = tuple(platforms), by or _caller()
        if not by.startswith(_OWN_PREFIX):
            self.fill()
        rule = _rule(op, function, platforms, _location(source or function), by)
        for platform in platforms or (None,):
            if earlier := self._rules.get((op, platform)):
                raise ValueError(f"{op} has two lowerings for {platform or 'all platforms'}: at {earlier.location} and at {rule.location}")
            self._rules[op, platform] = rule

    def keep_alive(self, op: OpOverload, find: Callable[[Node], Any]) -> None:
        """Registers a function that finds an object which must live as long as a graph with a node of this op.

        Ops need this if their arguments contain only the name of an object.

        Args:
            find: Takes the node, and returns the object.
        """
        self._keep_alive_by[op] = find

    def kept_alive(self, node: Node) -> Any:
        """Returns the object that must live as long as a node's graph; None for most ops."""
        find = self._keep_alive_by.get(node.target) if isinstance(node.target, OpOverload) else None
        return None if find is None else find(node)

    def register_name(self, name: str, function: Lowering, platforms: Iterable[str] = (), by: str | None = None) -> None:
        """Adds a lowering for an op of another library by the op's name, "namespace::name". The op need not exist yet.

        The lowering serves all overloads of the op whose schemas it fits. `by`: as in `register`.

        Raises:
            ValueError: The name already has a lowering for the platform.
        """
        by = by or _caller()
        if not by.startswith(_OWN_PREFIX):
            self.fill()
        named = _NamedLowering(function, tuple(platforms), _location(function), by)
        for platform in named.platforms or (None,):
            if earlier := self._named.get((name, platform)):
                raise ValueError(
                    f"{name} has two lowerings for {platform or 'all platforms'}: at {earlier.location} and at {named.location}"
                )
            self._named[name, platform] = named

    def find(self, op: OpOverload, platform: str | None = None) -> Rule | None:
        """Returns the lowering of an overload for a platform; None if there is none.

        Raises:
            TypeError: The lowering registered for the op's name fits no overload of the op.
        """
        self.fill()
        if isinstance(op, MissingOp):
            return None
        if rule := self._rules.get((op, platform)) or self._rules.get((op, None)):
            return rule
        for key in (platform, None):
            named = self._named.get((op._schema.name, key))
            if named is not None and (rule := self._bind(op, named)) is not None:
                return rule
        return None

    def _bind(self, op: OpOverload, named: _NamedLowering) -> Rule | None:
        """Returns the rule of a named lowering for an overload; None if the lowering fits only other overloads."""
        key = op, named
        if key not in self._bound:
            rule, refusal = _try_rule(op, named)
            if refusal is not None and not any(_try_rule(other, named)[0] for other in _overloads(op._schema.name)):
                raise refusal
            self._bound[key] = rule  # another thread may do this at the same time, with an equal rule
        return self._bound[key]

    def external_lowerings(self) -> list[str] | None:
        """Returns the lowerings registered by other libraries, as "op platform module:line", for the keys of cached programs.

        dynaxla's own lowerings are left out, because the hash of dynaxla's sources identifies them.

        Returns None if one of the functions is defined outside dynaxla and JAX: its module and line do not identify its code.
        """
        found = [(str(op), platform, rule.location, rule.registered_by) for (op, platform), rule in list(self._rules.items())]
        found += [(name, platform, lowering.location, lowering.registered_by) for (name, platform), lowering in list(self._named.items())]
        external = [(op, platform, location) for op, platform, location, by in found if not by.startswith(_OWN_PREFIX)]
        if any(location.partition(":")[0].partition(".")[0] not in ("dynaxla", "jax") for _, _, location in external):
            return None
        return sorted(f"{op} {platform} {location}" for op, platform, location in external)

    def __len__(self) -> int:
        self.fill()
        return len(self._rules) + len(self._named)

    def ops(self) -> set[OpOverload]:
        """Returns every existing overload that has a lowering on some platform."""
        self.fill()
        named = {op for (name, _), lowering in list(self._named.items()) for op in _overloads(name) if self._bind(op, lowering) is not None}
        return {op for op, _ in list(self._rules)} | named


def _rule(op: OpOverload, function: Lowering, platforms: tuple[str, ...], location: str, registered_by: str) -> Rule:
    positional, keywords, takes_context = _parameters(op, function)
    return Rule(op, function, platforms, takes_context, location, registered_by, positional, keywords)


def _try_rule(op: OpOverload, named: _NamedLowering) -> tuple[Rule | None, TypeError | None]:
    """Returns the rule of a named lowering for an overload; or None, and the error, if the lowering does not fit the overload's schema."""
    try:
        return _rule(op, named.function, named.platforms, named.location, named.registered_by), None
    except TypeError as error:
        return None, error


def _location(function: Lowering) -> str:
    """Returns the module and line of a function's definition, as module:line."""
    original = inspect.unwrap(function)
    return f"{getattr(inspect.getmodule(original), '__name__', '?')}:{getattr(getattr(original, '__code__', None), 'co_firstlineno', '?')}"


def _caller() -> str:
    """Returns the name of the module that called the caller of this function."""
    return str(sys._getframe(2).f_globals.get("__name__"))


def _overloads(name: str) -> list[OpOverload]:
    """Returns the overloads of the op with a name; an empty list if the op does not exist (yet)."""
    namespace, _, base = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), base, None)
    return [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]


def _load() -> None:
    """Imports dynaxla's lowerings.

    Raises:
        UnsupportedVersion: The import fails with a newer release of torch or JAX than the tested ones.
    """
    try:
        importlib.import_module(".ops", __package__).load()
    except Exception as error:
        if not private.newer_than_known():
            raise
        raise private.unsupported(f"dynaxla's lowerings cannot be loaded ({type(error).__name__}: {error})") from error


registry = Registry(_load)


def lowers(*ops: OpOverload | str, platforms: Iterable[str] = (), promote: Promotion | None = None) -> Callable[[Function], Function]:
    """Returns a decorator that registers a function of JAX arrays as the lowering of ATen ops, or of ops of your own:

        @dynaxla.lowers("mylib::scale")
        def scale(x, factor):
            return x * factor

    The function gets the op's arguments in the order of its schema, with arrays for tensors, and returns arrays for the op's results.
    docs/add-an-op.md has the rules. The decorator returns the function unchanged.

    Args:
        ops: overloads, such as `torch.ops.mylib.scale.default`, or names, such as "mylib::scale", of ops that may be defined later. A name
            stands for all overloads whose schema the function fits and that have no lowering of their own.
        platforms: JAX's names of the platforms ("cpu", "cuda", "rocm", "tpu") for which this function replaces the general lowering. ():
            the function is the general lowering.
        promote: if given, every positional argument is an operand: the function gets arrays of one dtype and one shape (ATen's promotion
            and broadcasting), and its result is cast to the promoted dtype. `ops` must then be overloads, not names.
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
    """Registers one-line lowerings: a table from overloads to functions. `promote`: as in `lowers`."""
    by = _caller()
    for op, function in table.items():
        registry.register(op, _promoting(function, promote) if promote else function, source=function, by=by)


def _promoting(function: Lowering, kind: Promotion) -> Lowering:
    """Returns a lowering that applies `function` to promoted and broadcast operands; see `elementwise`."""

    def lowering(*operands: Any) -> Any:
        return elementwise(function, operands, kind)

    lowering.__doc__ = function.__doc__
    return lowering
