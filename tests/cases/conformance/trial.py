"""Runs a call in eager mode and compiled, and compares the two. Excuses differences that torch's "aot_eager" has too."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import judge, randomness
from .calls import copy_tensors, joined, widened
from .entries import Trial

SEED = 20
_MOST_PROGRAMS = 150


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
        verdict: "pass", "skip" or "fail".
        label: The reason, or "raises:<error>", or "wrong <kind>".
        text: The message.
    """

    verdict: str
    label: str = ""
    text: str = ""


class Raised(Exception):
    """The call raised an exception, which is the attribute `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass
class Run:
    """The effects of a call.

    Attributes:
        inputs: The arguments, parameters and buffers, as they are after the call.
        random: True if the call drew random numbers.
    """

    inputs: list[torch.Tensor]
    result: Any
    gradients: list[torch.Tensor | None] | None
    random: bool


class Runner:
    """Runs the trials of one case. Calls that differ only in the values of tensors are compiled once."""

    def __init__(
        self, tolerance: Callable[[torch.dtype], judge.Tolerance], *, uninitialised: bool = False, backend: str = "dynaxla"
    ) -> None:
        self.tolerance = tolerance
        self.uninitialised = uninitialised
        self.backend = backend
        self._functions: dict[Any, Callable[..., Any]] = {}
        self._compiled_since = 0
        self._rejections: dict[tuple[str, ...], Counter[bool]] = {}

    def outcomes(self, trials: Iterable[Trial], together: int = 1) -> Iterator[tuple[Trial, Outcome]]:
        """Yields each trial with its outcome. Once two have passed, up to `together` calls are compiled as one function.

        A call is compiled alone if it does not pass together with others, or if not all of its arguments are tensors and literals.
        """
        first: list[Outcome] = []
        waiting: list[tuple[Trial, Run]] = []
        for trial in trials:
            if len(first) < 2 or any(outcome.verdict != "pass" for outcome in first) or not can_join(trial):
                outcome = self.run(trial)
                first = [*first, outcome][:2]
                yield trial, outcome
                continue
            try:
                waiting.append((trial, self._call(trial, None)))
            except Raised:
                yield trial, self.run(trial)
            if len(waiting) >= together:
                yield from self._joined(waiting)
                waiting = []
        yield from self._joined(waiting)

    def _joined(self, waiting: Sequence[tuple[Trial, Run]]) -> Iterator[tuple[Trial, Outcome]]:
        """Compiles trials, which come with eager mode's results, as one function."""
        outcomes = _run_joined([(self, trial, expected) for trial, expected in waiting])
        return ((trial, outcome) for (trial, _), outcome in zip(waiting, outcomes, strict=True))

    def _make_room(self) -> None:
        """Drops programs. Each takes some of a process's memory mappings (65,530 on Linux), and XLA crashes if there are no more."""
        self._compiled_since += 1
        if self._compiled_since > _MOST_PROGRAMS:
            self._compiled_since = 0
            self._functions.clear()
            torch._dynamo.reset()
            gc.collect()

    def call_together(self, trials: Sequence[Trial]) -> list[Run]:
        """Compiles the calls as one function and runs it. Raises Raised."""
        self._make_room()
        tensors = [copy_tensors(trial.call.tensors) for trial in trials]
        torch.manual_seed(SEED)
        try:
            function = torch.compile(joined([trial.call for trial in trials]), backend=self.backend, fullgraph=True, dynamic=False)
            with torch.no_grad():
                results = function(*itertools.chain(*tensors))
        except Exception as error:
            raise Raised(error) from error
        return [Run(inputs, result, None, False) for inputs, result in zip(tensors, results, strict=True)]

    def run(self, trial: Trial) -> Outcome:
        """Compiles a trial alone, and returns its outcome."""
        try:
            return self._run(trial)
        except Exception as error:  # an error of this suite, not of the tested code
            return Outcome("fail", f"suite:{type(error).__name__}", "".join(traceback.format_exception(error))[-1500:])

    def _run(self, trial: Trial) -> Outcome:
        try:
            expected = self._call(trial, None)
        except Raised as raised:
            if not trial.expects_error:
                return Outcome("skip", f"eager raises {error_name(raised.error)}", str(raised.error)[:300])
            return self._expect_error(trial, raised.error)
        if trial.expects_error:
            return Outcome("skip", "eager accepts the error input")
        if trial.differentiate and expected.gradients is None:
            return Outcome("skip", "nothing to differentiate")
        try:
            actual = self._call(trial, self.backend)
        except Raised as raised:
            return self._raised(trial, raised.error)
        difference = self.compare(trial, actual, expected)
        if isinstance(difference, Outcome):
            return difference
        return self._differs(trial, difference)

    def compare(self, trial: Trial, actual: Run, expected: Run) -> judge.Difference | Outcome:
        """Returns a difference, or the outcome of runs that agree."""
        forms = [
            judge.form(actual.result, expected.result),
            judge.form(actual.inputs, expected.inputs),
            judge.aliasing((actual.inputs, actual.result), (expected.inputs, expected.result)),
            judge.form(actual.gradients, expected.gradients, strides=False),
        ]
        found = next((difference for difference in forms if difference is not None), None)
        if found is not None:
            return found
        if self.uninitialised:
            return Outcome("pass", "values not compared: uninitialised memory")
        reference = functools.cache(lambda: None if expected.random else self._call_wide(trial))
        found, note = self._values(trial, actual, expected, reference)
        if found is None:
            return Outcome("pass", note)
        if expected.random:
            draws = [_drawn(trial, self._call(trial, None, seed)) for seed in range(randomness.DRAWS)]
            return randomness.implausible(_drawn(trial, actual), draws) or Outcome("pass", "values not compared: random")
        return found

    def _values(self, trial: Trial, actual: Run, expected: Run, reference: Callable[[], Run | None]) -> tuple[judge.Difference | None, str]:
        """Returns the difference of values, or None and a note on how the results were compared."""

        def part_of_reference(part: Callable[[Run], Any]) -> Callable[[], Any]:
            return lambda: None if (run := reference()) is None else part(run)

        def others(run: Run) -> Any:
            """Returns the tensors that are not compared as results."""
            return [run.inputs[index] for index in separate], run.gradients

        separate = [i for i, tensor in enumerate(expected.inputs) if not any(tensor is leaf for leaf in judge.leaves(expected.result))]
        found = judge.values(actual.result, expected.result, self.tolerance, part_of_reference(lambda run: run.result))
        note = ""
        if found is not None and trial.unique is not None:
            unique = functools.partial(_unique, trial)
            found = judge.values(unique(actual), unique(expected), self.tolerance, part_of_reference(unique))
            note = "compared in what of the results is unique"
        return found or judge.values(others(actual), others(expected), self.tolerance, part_of_reference(others), "input"), note

    def call_eagerly(self, trial: Trial) -> Run:
        """Runs the call in eager mode. Raises Raised."""
        return self._call(trial, None)

    def _call_wide(self, trial: Trial) -> Run | None:
        """Runs the call in eager mode in float64 or complex128. Returns None if it raises."""
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return self._call(trial, None, wide=True)
        except Raised:
            return None
        finally:
            torch.set_default_dtype(default)

    def _call(self, trial: Trial, backend: str | None, seed: int = SEED, wide: bool = False) -> Run:
        """Runs the call, in eager mode if there is no backend. Raises Raised."""
        call = trial.call
        if isinstance(call.function, torch.nn.Module):
            module = copy.deepcopy(call.function)
            module = module.to(torch.complex128 if any(p.is_complex() for p in module.parameters()) else torch.float64) if wide else module
            call = copy.copy(call)
            call.function = module
        tensors = [widened(tensor) for tensor in call.tensors] if wide else copy_tensors(call.tensors)
        if wide:
            call = call.widened()
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        try:
            function = self._compiled(call, backend) if backend is not None else call.python_function()
            with torch.set_grad_enabled(trial.differentiate):
                result = function(*tensors)
            drew = not torch.equal(before, torch.get_rng_state())
            states = states_of(call.function)
            gradients = gradients_of((trial.process or _identity)(result), [*tensors, *states]) if trial.differentiate else None
        except Exception as error:
            raise Raised(error) from error
        return Run([*tensors, *states], result, gradients, drew)

    def _compiled(self, call: Any, backend: str) -> Callable[..., Any]:
        key = None if isinstance(call.function, torch.nn.Module) else call.key
        if backend != self.backend or key is None:
            self._make_room()
            return torch.compile(call.python_function(), backend=backend, fullgraph=True, dynamic=False)
        if key not in self._functions:
            self._make_room()
            self._functions[key] = torch.compile(call.python_function(), backend=backend, fullgraph=True, dynamic=False)
        return self._functions[key]

    def _expect_error(self, trial: Trial, expected: Exception) -> Outcome:
        """Checks that the call raises eager mode's exception, or the exception of torch.compile."""
        found: Exception | None = None
        try:
            self._call(trial, self.backend)
        except Raised as raised:
            found = raised.error
        if isinstance(found, type(expected)) and error_name(found) != "LoweringError":
            return Outcome("pass")
        try:
            self._call(trial, "aot_eager")
        except Raised as raised:
            if found is None:
                return Outcome("fail", "wrong acceptance", f"accepted; eager raises, e.g. {str(expected)[:200]}")
            if type(found) is not type(raised.error):
                return Outcome("fail", f"raises:{error_name(found)}", f"{str(found)[:300]}; eager raises {error_name(expected)}")
            return Outcome("skip", f"torch.compile raises {error_name(found)}")
        if found is not None and error_name(found) == "LoweringError":
            return Outcome("fail", "raises:LoweringError", str(found)[:300])
        return Outcome("skip", "torch.compile accepts the error input")

    def _raised(self, trial: Trial, error: Exception) -> Outcome:
        """Handles an exception of the compiled call. aot_eager is asked a few times for each kind of error; then its answer is known."""
        name, text = error_name(error), str(error).strip()
        answers = self._rejections.setdefault((name, *_words(text)), Counter())
        if sum(answers.values()) < 3 or len(answers) > 1:
            try:
                self._call(trial, "aot_eager")
                answers[False] += 1
                is_rejected = False
            except Raised:
                answers[True] += 1
                is_rejected = True
        else:
            is_rejected = answers[True] > 0
        if is_rejected:
            return Outcome("skip", f"torch.compile raises {name}", text[:300])
        return Outcome("fail", f"raises:{name}", text[:600])

    def _differs(self, trial: Trial, difference: judge.Difference) -> Outcome:
        """Returns a failure, unless torch.compile itself differs from eager mode, and the results are exactly its results."""
        # Ops that "aot_eager" does not decompose may return an input. Decomposed, as backends get them, they return a copy.
        with_decompositions = ("aot_eager_decomp_partition",) if difference.kind == "aliasing" else ()
        for backend in ("aot_eager", *with_decompositions):
            try:
                expected_of_compile = self._call(trial, backend)
            except Raised:
                continue
            if isinstance(self.compare(trial, self._call(trial, self.backend), expected_of_compile), Outcome):
                return Outcome("skip", f"torch.compile itself differs from eager: {difference.kind}", difference.text[:300])
        return Outcome("fail", f"wrong {difference.kind}", difference.text[:600])


def run_together(calls: Sequence[tuple[Runner, Trial]]) -> list[Outcome]:
    """Compiles calls of several cases as one function, and returns their outcomes. Calls that do not pass are compiled alone."""
    outcomes: dict[int, Outcome] = {}
    waiting: dict[int, tuple[Runner, Trial, Run]] = {}
    for index, (runner, trial) in enumerate(calls):
        try:
            waiting[index] = runner, trial, runner.call_eagerly(trial)
        except Raised:
            outcomes[index] = runner.run(trial)
    outcomes |= zip(waiting, _run_joined(list(waiting.values())), strict=True)
    return [outcomes[index] for index in range(len(calls))]


def _run_joined(waiting: Sequence[tuple[Runner, Trial, Run]]) -> list[Outcome]:
    """Compiles trials, each with its case's runner and eager mode's results, as one function. Returns their outcomes."""
    try:
        runs = waiting[0][0].call_together([trial for _, trial, _ in waiting]) if waiting else []
    except Raised:
        runs = []
    outcomes = []
    for index, (runner, trial, expected) in enumerate(waiting):
        found = runner.compare(trial, runs[index], expected) if runs else None
        outcomes.append(found if isinstance(found, Outcome) else runner.run(trial))
    return outcomes


def _unique(trial: Trial, run: Run) -> list[torch.Tensor]:
    """Returns the part of the result that is unique."""
    with torch.no_grad():
        return judge.leaves(run.result) if trial.unique is None else trial.unique(run.result, run.inputs[0])


def _drawn(trial: Trial, run: Run) -> list[Any]:
    """Returns all values that may depend on random numbers."""
    return [_unique(trial, run), run.inputs, run.gradients]


def can_join(trial: Trial) -> bool:
    """True if the trial can be compiled as one function with others."""
    return not trial.expects_error and not trial.differentiate and not isinstance(trial.call.function, torch.nn.Module)


def error_name(error: BaseException) -> str:
    inner = getattr(error, "inner_exception", None)
    return type(inner if inner is not None else error).__name__


def _words(text: str) -> Sequence[str]:
    """Returns the first line of a message, without numbers."""
    first = text.partition("\n")[0]
    return ["".join(letter for letter in first if not letter.isdigit())[:160]]


def _identity(value: Any) -> Any:
    return value


def states_of(function: Any) -> list[torch.Tensor]:
    return [*function.parameters(), *function.buffers()] if isinstance(function, torch.nn.Module) else []


def gradients_of(results: Any, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor | None] | None:
    """Returns the gradients of all inputs that require them, for random cotangents; None if nothing can be differentiated."""
    outputs = [leaf for leaf in judge.leaves(results) if leaf.requires_grad]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not outputs or not wanted:
        return None
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(leaf.shape, dtype=leaf.dtype, device="cpu", generator=generator).to(leaf.device) for leaf in outputs]
    return list(torch.autograd.grad(outputs, wanted, cotangents, allow_unused=True))


def quiet() -> None:
    """Ignores warnings, because torch's databases use deprecated and beta functions on purpose. Warnings of dynaxla and JAX are errors."""
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", module=r"(dynaxla|jax|jaxlib)(\.|$)")
    warnings.filterwarnings("ignore", "An output with one or more elements was resized")
