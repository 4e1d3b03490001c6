"""The alternative implementations of an op. The fastest one depends on the platform and the shapes.

    @CONVOLUTION.implementation("onednn", platforms=["cpu"], supports=..., preferred=...)
    def by_onednn(problem, x, weight, bias): ...

An implementation is a function of the problem (a hashable description of shapes, dtypes, settings and the platform) and the operands. All
implementations of an op return the same result up to rounding.

Of the implementations that support a problem (`supports`), the first one in registration order for which `preferred` is true is used. The
last implementation must support every problem on every platform. With the option `tune`, all implementations that support the problem are
measured instead (see dynaxla.tuning).

An implementation that needs a library or hardware feature that a machine may lack is registered as refusable: if XLA refuses to compile a
program with this implementation, the program is compiled without it.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from ..errors import OptionError
from ..observe import events
from .dtypes import DType
from .registry import registry


@dataclass(frozen=True)
class Operand:
    """The metadata of an operand.

    Attributes:
        shape: The logical shape.
        dtype: The dtype.
        order: The memory order: dimensions from the slowest-varying to the fastest. None for row-major.
    """

    shape: tuple[int, ...]
    dtype: DType
    order: tuple[int, ...] | None = None


class OpProblem(Protocol):
    """The description of a call of an op, for which an implementation is chosen.

    Attributes:
        platform: JAX's name of the platform on which the op runs.
    """

    @property
    def platform(self) -> str: ...


@runtime_checkable
class Measurable(OpProblem, Protocol):
    """A problem whose implementations can be measured. Problems with equal repr() are equal; str() is the text in reports.

    Attributes:
        operands: The arguments that an implementation takes after the problem.
        result_order: The memory order of the result, as in `Operand`.
    """

    @property
    def operands(self) -> Sequence[Operand]: ...

    @property
    def result_order(self) -> tuple[int, ...] | None: ...


Problem = TypeVar("Problem", bound=OpProblem)


@dataclass(frozen=True)
class Implementation(Generic[Problem]):
    """One implementation of an op.

    Attributes:
        name: The name, unique for the op.
        run: Takes the problem and the operands, and returns the result.
        platforms: The platforms on which the implementation exists; empty for all.
        supports: Predicate of problems on these platforms: the implementation can compute the problem.
        preferred: Predicate of problems: the implementation is expected to be faster than those registered after it.
        epilogues: The activations that the implementation can compute together with the op; see epilogue.py.
        is_refusable: True if XLA may refuse to compile the implementation on a machine that lacks a library or a hardware feature.
        is_partitionable: True if XLA's partitioner can divide the implementation among the devices of a mesh. The last implementation of
            an op counts as partitionable even if this is False.
        registered_by: The module that registered the implementation.
    """

    name: str
    run: Callable[..., Any]
    platforms: tuple[str, ...]
    supports: Callable[[Problem], bool]
    preferred: Callable[[Problem], bool]
    epilogues: frozenset[str] = frozenset()
    is_refusable: bool = False
    is_partitionable: bool = False
    registered_by: str = ""

    def can_run(self, problem: Problem) -> bool:
        """True if the implementation exists on the problem's platform, and supports the problem."""
        return (not self.platforms or problem.platform in self.platforms) and self.supports(problem)


class Implementations(Generic[Problem]):
    """The implementations of one op.

    Attributes:
        op: The op's name, as in `IMPLEMENTATIONS`.
        by_name: The implementations, in the order of registration.
    """

    def __init__(self, op: str) -> None:
        self.op = op
        self.by_name: dict[str, Implementation[Problem]] = {}
        IMPLEMENTATIONS[op] = self

    def implementation(
        self,
        name: str,
        *,
        platforms: Iterable[str] = (),
        supports: Callable[[Problem], bool] = lambda _: True,
        preferred: Callable[[Problem], bool] = lambda _: True,
        epilogues: Iterable[str] = (),
        is_refusable: bool = False,
        is_partitionable: bool = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Returns a decorator that registers a function as an implementation. The arguments are those of `Implementation`."""
        registered_by = str(sys._getframe(1).f_globals.get("__name__"))

        def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
            self.by_name[name] = Implementation(
                name, run, tuple(platforms), supports, preferred, frozenset(epilogues), is_refusable, is_partitionable, registered_by
            )
            return run

        return decorate

    def available(self, problem: Problem, forced: Mapping[str, str]) -> list[Implementation[Problem]]:
        """Returns the implementations that support a problem.

        Args:
            forced: By op, the name of an implementation. If that implementation supports the problem, no other is returned.
        """
        forced_implementation = self.by_name.get(forced.get(self.op, ""))
        if forced_implementation is not None and forced_implementation.can_run(problem):
            return [forced_implementation]
        return [implementation for implementation in self.by_name.values() if implementation.can_run(problem)]

    def choose(self, problem: Problem, forced: Mapping[str, str]) -> Implementation[Problem]:
        """Returns the implementation that is expected to be the fastest. `forced`: see `available`."""
        available = self.available(problem, forced)
        return available[0] if len(available) == 1 else next(item for item in available if item.preferred(problem))

    def choose_without_refusable(self, problem: Problem) -> Implementation[Problem]:
        """Returns the implementation that is expected to be the fastest, other than refusable ones."""
        return next(item for item in self.by_name.values() if not item.is_refusable and item.can_run(problem) and item.preferred(problem))


# The implementations by op. The dict is complete only after all lowerings have been imported (`Registry.fill`).
IMPLEMENTATIONS: dict[str, Implementations[Any]] = {}


def external_implementations() -> list[tuple[str, str, str, str]] | None:
    """Returns the implementations registered outside dynaxla.lowering.

    Returns: (op, name, module, function) for each, sorted; None if one of the functions is not defined in dynaxla.
    """
    external = [
        (op, item.name, item.run.__module__, item.run.__qualname__)
        for op, implementations in IMPLEMENTATIONS.items()
        for item in implementations.by_name.values()
        if not item.registered_by.startswith("dynaxla.lowering.")
    ]
    return None if any(module.partition(".")[0] != "dynaxla" for _, _, module, _ in external) else sorted(external)


# Chooses one of an op's implementations for a problem.
Chooser = Callable[[Implementations[Any], Any], Implementation[Any]]


def choose_by_rules(implementations: Implementations[Any], problem: Any) -> Implementation[Any]:
    """Returns the implementation that is expected to be the fastest."""
    return implementations.choose(problem, {})


def choose_without_refusable(implementations: Implementations[Any], problem: Any) -> Implementation[Any]:
    """Returns the implementation that is expected to be the fastest, other than refusable ones."""
    return implementations.choose_without_refusable(problem)


def choose_generic(implementations: Implementations[Any], problem: Any) -> Implementation[Any]:
    """Returns the last implementation, which supports every problem.

    The last implementation uses only JAX's own operations, so JAX can differentiate and batch it.
    """
    return list(implementations.by_name.values())[-1]


def choose_for_mesh(implementations: Implementations[Any], problem: Any) -> Implementation[Any]:
    """Returns an implementation that XLA's partitioner can divide among the devices of a mesh."""
    available = [item for item in implementations.by_name.values() if item.is_partitionable and item.can_run(problem)]
    return next((item for item in available if item.preferred(problem)), choose_generic(implementations, problem))


class RecordingChooser:
    """A `Chooser` that wraps another one. It records which refusable implementations were chosen, and can avoid them.

    Attributes:
        refusable: The refusable implementations that were chosen, as "op=implementation".
        avoids_refusable: If True, no refusable implementation is chosen.
    """

    def __init__(self, choose: Chooser) -> None:
        self._choose = choose
        self.refusable: set[str] = set()
        self.avoids_refusable = False

    def __call__(self, implementations: Implementations[Any], problem: Any) -> Implementation[Any]:
        implementation = self._chosen(implementations, problem)
        if events.has_listeners():
            others = [other.name for other in implementations.available(problem, {}) if other is not implementation]
            is_measurable = isinstance(problem, Measurable)
            events.emit(events.ImplementationChosen(implementations.op, str(problem), implementation.name, others, is_measurable))
        return implementation

    def _chosen(self, implementations: Implementations[Any], problem: Any) -> Implementation[Any]:
        implementation = self._choose(implementations, problem)
        if not implementation.is_refusable:
            return implementation
        if self.avoids_refusable:
            return implementations.choose_without_refusable(problem)
        self.refusable.add(f"{implementations.op}={implementation.name}")
        return implementation


def check_forced(forced: Mapping[str, str]) -> None:
    """Checks the names of ops and implementations in DYNAXLA_IMPLEMENTATIONS.

    Args:
        forced: By op, the name of an implementation.

    Raises:
        OptionError: An op has no alternative implementations, or no implementation of this name.
    """
    if forced:
        registry.fill()
    for op, name in forced.items():
        if op not in IMPLEMENTATIONS:
            close = difflib.get_close_matches(op, IMPLEMENTATIONS, n=1)
            suggestion = f"did you mean {close[0]!r}? " if close else ""
            raise OptionError(
                f"DYNAXLA_IMPLEMENTATIONS: the op {op!r} has no implementations to choose from",
                hint=f"{suggestion}the ops with several implementations are: {', '.join(IMPLEMENTATIONS)}",
            )
        names = IMPLEMENTATIONS[op].by_name
        if name not in names:
            raise OptionError(
                f"DYNAXLA_IMPLEMENTATIONS: {op} has no implementation {name!r}", hint=f"its implementations are: {', '.join(names)}"
            )
