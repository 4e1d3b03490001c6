"""Forms: one op, computed in one of several ways. Which is fastest depends on the platform and the shapes.

    @CONVOLUTION.form("onednn", platforms=["cpu"], fits=..., suits=...)
    def by_onednn(problem, x, weight, bias): ...

A form is a function from the problem (a hashable description of shapes, dtypes, settings and the platform) and the operands to the
result. All forms of an op give the same result up to rounding. The first that fits and suits is taken, in the order in which they are
written; the last one must exist on every platform, and fit and suit everything. With the option `tune`, all that fit are measured
instead (see dynaxla.tuning). A form that calls what a machine may lack says that XLA may refuse it; the program is then compiled without.
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
    """An array as a network holds it. order: its dimensions from the slowest in memory to the fastest; None: row-major."""

    shape: tuple[int, ...]
    dtype: DType
    order: tuple[int, ...] | None = None


class Posed(Protocol):
    """A problem. Attributes: platform (JAX's name of the one on which it is to be solved)."""

    @property
    def platform(self) -> str: ...


@runtime_checkable
class Measurable(Posed, Protocol):
    """A problem that can be measured. Two with the same repr are the same; str() is for people.

    Attributes: operands (what a form takes besides the problem); result_order (of the result's dimensions, as in `Operand`).
    """

    @property
    def operands(self) -> Sequence[Operand]: ...

    @property
    def result_order(self) -> tuple[int, ...] | None: ...


Problem = TypeVar("Problem", bound=Posed)


@dataclass(frozen=True)
class Form(Generic[Problem]):
    """One way to compute an op.

    Attributes: name; run (the problem and the operands to the result); platforms (where it exists; empty means everywhere); fits (whether
    it can solve a problem at all, on those); suits (whether it is expected to be the fastest, among the forms behind it); epilogues (what
    it can compute besides: see epilogue.py); is_refusable (whether a machine may lack what it calls, which XLA says when it compiles); by
    (the module that registered it).
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
        """Whether it exists on the problem's platform, and fits."""
        return (not self.platforms or problem.platform in self.platforms) and self.fits(problem)


class Forms(Generic[Problem]):
    """The forms of one op, in the order in which they are preferred."""

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
        """Register a function as a form."""
        by = str(sys._getframe(1).f_globals.get("__name__"))

        def decorate(run: Callable[..., Any]) -> Callable[..., Any]:
            self.forms[name] = Form(name, run, tuple(platforms), fits, suits, frozenset(epilogues), is_refusable, by)
            return run

        return decorate

    def fitting(self, problem: Problem, forced: Mapping[str, str]) -> list[Form[Problem]]:
        """The forms that can solve a problem. forced: forms by op that are taken wherever they fit, so that there is no other then."""
        wanted = self.forms.get(forced.get(self.op, ""))
        if wanted is not None and wanted.solves(problem):
            return [wanted]
        return [form for form in self.forms.values() if form.solves(problem)]

    def choose(self, problem: Problem, forced: Mapping[str, str]) -> Form[Problem]:
        """The form that is expected to be the fastest. forced: as in `fitting`."""
        fitting = self.fitting(problem, forced)
        return fitting[0] if len(fitting) == 1 else next(form for form in fitting if form.suits(problem))

    def choose_certain(self, problem: Problem) -> Form[Problem]:
        """As `choose`, of those alone that no machine refuses."""
        return next(form for form in self.forms.values() if not form.is_refusable and form.solves(problem) and form.suits(problem))


# By op, as far as the lowerings have been imported (`Registry.fill`).
FORMS: dict[str, Forms[Any]] = {}


def places() -> list[tuple[str, str, str, str]] | None:
    """The forms that others have registered: op, name, module and function. None if one is not of dynaxla's."""
    forms = [(op, form) for op, known in FORMS.items() for form in known.forms.values() if not form.by.startswith("dynaxla.lowering.")]
    found = [(op, form.name, form.run.__module__, form.run.__qualname__) for op, form in forms]
    return None if any(module.partition(".")[0] != "dynaxla" for _, _, module, _ in found) else sorted(found)


Choice = Callable[[Forms[Any], Any], Form[Any]]


def expected(forms: Forms[Any], problem: Any) -> Form[Any]:
    """The form that is expected to be the fastest."""
    return forms.choose(problem, {})


def generic(forms: Forms[Any], problem: Any) -> Form[Any]:
    """The form that fits everything, of nothing but JAX's own operations: they can be differentiated and batched."""
    return list(forms.forms.values())[-1]


class Choices:
    """A `Choice` that can do without forms that the machine may lack. choose: what it asks otherwise.

    Attributes: refusable (such forms that it has chosen, as "op=form"); is_certain (whether it does without them).
    """

    def __init__(self, choose: Choice) -> None:
        self._choose = choose
        self.refusable: set[str] = set()
        self.is_certain = False

    def __call__(self, forms: Forms[Any], problem: Any) -> Form[Any]:
        form = self._taken(forms, problem)
        if events.is_heard():
            others = [other.name for other in forms.fitting(problem, {}) if other is not form]
            events.tell(events.Took(forms.op, str(problem), form.name, others, isinstance(problem, Measurable)))
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
    """Raises: OptionError for an op without forms, or a form that it does not have."""
    if forced:
        registry.fill()
    for op, name in forced.items():
        if op not in FORMS:
            close = difflib.get_close_matches(op, FORMS, n=1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            raise OptionError(f"option forms: no op {op!r} with forms", hint=f"{meant}there are: {', '.join(FORMS)}")
        if name not in FORMS[op].forms:
            raise OptionError(f"option forms: {op} has no form {name!r}", hint=f"its forms are: {', '.join(FORMS[op].forms)}")
