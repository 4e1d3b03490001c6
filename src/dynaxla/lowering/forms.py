"""Forms: the alternative implementations of one op. The fastest form depends on the platform and the shapes.

    @CONVOLUTION.form("onednn", platforms=["cpu"], fits=..., suits=...)
    def by_onednn(problem, x, weight, bias): ...

A form is a function of the problem (a hashable description of shapes, dtypes, settings and the platform) and the operands. All forms of an
op return the same result up to rounding. The first form, in registration order, that supports the problem (`fits`) and is expected to be
fastest (`suits`) is used. The last form must support every problem on every platform. With the option `tune`, all supported forms are
measured instead (see dynaxla.tuning). A form whose library or hardware feature a machine may lack is registered as refusable: if XLA
refuses to compile it, the program is compiled without it.
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
    """An operand's array.

    Attributes:
        shape: Its logical shape.
        dtype: Its dtype.
        order: Its dimensions from the slowest-varying in memory to the fastest; None for row-major.
    """

    shape: tuple[int, ...]
    dtype: DType
    order: tuple[int, ...] | None = None


class Posed(Protocol):
    """A problem for which a form is chosen.

    Attributes:
        platform: JAX's name of the platform on which the op runs.
    """

    @property
    def platform(self) -> str: ...


@runtime_checkable
class Measurable(Posed, Protocol):
    """A problem whose forms can be measured. Two problems with the same repr are the same; str() is for people.

    Attributes:
        operands: The arguments of a form after the problem.
        result_order: The order of the result's dimensions, as in `Operand`.
    """

    @property
    def operands(self) -> Sequence[Operand]: ...

    @property
    def result_order(self) -> tuple[int, ...] | None: ...


Problem = TypeVar("Problem", bound=Posed)


@dataclass(frozen=True)
class Form(Generic[Problem]):
    """One implementation of an op.

    Attributes:
        name: Its name, unique for the op.
        run: Takes the problem and the operands, and returns the result.
        platforms: The platforms on which it exists; empty for all.
        fits: True if it supports a problem on those platforms.
        suits: True if it is expected to be the fastest for a problem, among itself and the forms registered after it.
        epilogues: The activations that it can compute together with the op (see epilogue.py).
        is_refusable: True if XLA may refuse to compile it on a machine that lacks a library or a hardware feature.
        by: The module that registered it.
    """

    name: str
    run: Callable[..., Any]
    platforms: tuple[str, ...]
    fits: Callable[[Problem], bool]
    suits: Callable[[Problem], bool]
    epilogues: frozenset[str] = frozenset()
    is_refusable: bool = False
    by: str = ""

    def solves(self, problem: Problem) -> bool:
        """True if the form exists on the problem's platform, and supports the problem."""
        return (not self.platforms or problem.platform in self.platforms) and self.fits(problem)


class Forms(Generic[Problem]):
    """The forms of one op, in order of preference."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.forms: dict[str, Form[Problem]] = {}
        FORMS[op] = self

    def form(
        self,
        name: str,
        *,
        platforms: Iterable[str] = (),
        fits: Callable[[Problem], bool] = lambda _: True,
        suits: Callable[[Problem], bool] = lambda _: True,
        epilogues: Iterable[str] = (),
        is_refusable: bool = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Registers a function as a form."""
        by = str(sys._getframe(1).f_globals.get("__name__"))

        def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
            self.forms[name] = Form(name, run, tuple(platforms), fits, suits, frozenset(epilogues), is_refusable, by)
            return run

        return decorate

    def fitting(self, problem: Problem, forced: Mapping[str, str]) -> list[Form[Problem]]:
        """Returns the forms that support a problem.

        Args:
            forced: For some ops, the name of the only form to return wherever it supports the problem.
        """
        wanted = self.forms.get(forced.get(self.op, ""))
        if wanted is not None and wanted.solves(problem):
            return [wanted]
        return [form for form in self.forms.values() if form.solves(problem)]

    def choose(self, problem: Problem, forced: Mapping[str, str]) -> Form[Problem]:
        """Returns the form that is expected to be the fastest. `forced`: as in `fitting`."""
        fitting = self.fitting(problem, forced)
        return fitting[0] if len(fitting) == 1 else next(form for form in fitting if form.suits(problem))

    def choose_certain(self, problem: Problem) -> Form[Problem]:
        """Returns the form that is expected to be the fastest among those that no machine refuses."""
        return next(form for form in self.forms.values() if not form.is_refusable and form.solves(problem) and form.suits(problem))


# By op. Complete only after all lowerings have been imported (`Registry.fill`).
FORMS: dict[str, Forms[Any]] = {}


def places() -> list[tuple[str, str, str, str]] | None:
    """Returns the forms registered outside dynaxla.lowering as (op, name, module, function); None if one is not defined in dynaxla."""
    forms = [(op, form) for op, known in FORMS.items() for form in known.forms.values() if not form.by.startswith("dynaxla.lowering.")]
    found = [(op, form.name, form.run.__module__, form.run.__qualname__) for op, form in forms]
    return None if any(module.partition(".")[0] != "dynaxla" for _, _, module, _ in found) else sorted(found)


Choice = Callable[[Forms[Any], Any], Form[Any]]


def expected(forms: Forms[Any], problem: Any) -> Form[Any]:
    """Returns the form that is expected to be the fastest."""
    return forms.choose(problem, {})


def certain(forms: Forms[Any], problem: Any) -> Form[Any]:
    """Returns the form that is expected to be the fastest among those that no machine refuses."""
    return forms.choose_certain(problem)


def generic(forms: Forms[Any], problem: Any) -> Form[Any]:
    """Returns the form that supports every problem. It uses only JAX's own operations, which can be differentiated and batched."""
    return list(forms.forms.values())[-1]


class Choices:
    """A `Choice` that wraps another one, records the refusable forms, and can avoid them.

    Attributes:
        refusable: The refusable forms that it has chosen, as "op=form".
        is_certain: True if it chooses no refusable form.
    """

    def __init__(self, choose: Choice) -> None:
        self._choose = choose
        self.refusable: set[str] = set()
        self.is_certain = False

    def __call__(self, forms: Forms[Any], problem: Any) -> Form[Any]:
        form = self._taken(forms, problem)
        if events.has_listeners():
            others = [other.name for other in forms.fitting(problem, {}) if other is not form]
            events.emit(events.FormChosen(forms.op, str(problem), form.name, others, isinstance(problem, Measurable)))
        return form

    def _taken(self, forms: Forms[Any], problem: Any) -> Form[Any]:
        form = self._choose(forms, problem)
        if not form.is_refusable:
            return form
        if self.is_certain:
            return forms.choose_certain(problem)
        self.refusable.add(f"{forms.op}={form.name}")
        return form


def check_forced(forced: Mapping[str, str]) -> None:
    """Checks that each op has forms, and the named form among them.

    Raises:
        OptionError: An op without forms, or an unknown form.
    """
    if forced:
        registry.fill()
    for op, name in forced.items():
        if op not in FORMS:
            close = difflib.get_close_matches(op, FORMS, n=1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            raise OptionError(f"DYNAXLA_FORMS: the op {op!r} has no forms", hint=f"{meant}the ops with forms are: {', '.join(FORMS)}")
        if name not in FORMS[op].forms:
            raise OptionError(f"DYNAXLA_FORMS: {op} has no form {name!r}", hint=f"its forms are: {', '.join(FORMS[op].forms)}")
