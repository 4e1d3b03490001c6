"""The contest of engines for a graph, during the user's calls: finds the engines that agree with eager mode, and the fastest of these.

Each call is served by eager mode (TorchDynamo's graph as it is), or by an engine that has been checked with these sizes. A call may do
additional work:

- A check, once for each engine and each combination of sizes: the engine runs on clones of the inputs, and its results and side effects are
  compared with those of eager mode. One call checks one engine, so a call takes about as long as eager mode and the engine together. In
  training, a check takes a second eager run on clones, for the gradients.
- Timing, in blocks of calls that alternate between engines. In inference nothing runs twice: the engines serve the calls. In training,
  where the user decides when the backward pass runs, eager mode serves the call, and an engine runs forward and backward additionally.

Dynamic sizes are grouped into classes, whose bounds are powers of two. The fastest engine is decided once for a class. If each call has
other sizes, no engine can be timed twice with the same sizes; then the times of the checks decide.

An engine whose results were wrong once, with any sizes, does not run this graph again. If a graph cannot run on clones, the default engine
runs it without a check.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import forks
from ..observe import metrics
from ..observe.engine_decisions import Verdict, record_verdict
from ..runtime import private
from . import obstacles
from .clones import clones
from .verification import Call, Expected, now, run

EAGER = "eager"
# The engine for graphs that must not be run twice.
DEFAULT_ENGINE = "dynaxla"
# A round times one block of calls for each engine. The numbers: the minimum and the maximum number of rounds, and the timed seconds after
# which no further round begins. The last number applies if two engines are nearly equally fast, because ranking them takes more samples.
_MIN_ROUNDS, _MAX_ROUNDS, _MIN_SECONDS, _MIN_SECONDS_IF_CLOSE = 3, 24, 1.0, 3.0
# After the first round, the second and so on, an engine that takes more than this multiple of the fastest engine's time is not timed again.
_MAX_SLOWDOWNS = (2.0, 1.5, 1.25, 1.2, 1.15, 1.1)
# The number of timed calls in a block, by an upper bound of the seconds of a call. The first call of a block (in the first round, the first
# two) is not timed, because another engine has filled the caches.
_CALLS_PER_BLOCK = ((0.001, 8), (0.02, 5), (0.1, 3), (float("inf"), 2))
# If sizes are new in every call, the times of the checks decide after this number of timed checks of each engine. A check in which the
# engine compiles is not timed.
_MIN_CHECKS = 3
# The smallest bound of a class of sizes.
_SMALLEST_BOUND = 16
# The maximum number of combinations of sizes for which `Contest` stores the engines that agree with eager mode.
_MAX_SIZES = 4096
# The check of an engine that has not compiled yet (compile="background") is repeated after 2 calls, then 4, 8, ..., at most this number.
_MAX_PAUSE = 64
# Timing starts again with other sizes after more than this number of successive calls whose sizes are not the timed sizes.
_MAX_CALLS_WITH_OTHER_SIZES = 16


@dataclass
class Timing:
    """The timings of one engine.

    Attributes:
        calls: the seconds of the timed calls.
        block: the number of calls in the current block so far.
        ratios: for each check in which nothing was compiled, the engine's seconds divided by eager mode's seconds.
    """

    calls: list[float] = field(default_factory=list)
    block: int = 0
    ratios: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The mean seconds of the fastest third of the calls: other load on the machine makes calls slower, never faster."""
        return statistics.fmean(sorted(self.calls)[: max(1, len(self.calls) // 3)]) if self.calls else float("inf")


class Choices:
    """The choices of earlier processes. This base class has none; see stored_choices.py."""

    def find(self, sizes: Hashable) -> tuple[str, Mapping[str, float]] | None:
        """Returns the fastest engine for a class of sizes, and the measured seconds; None if there is no choice."""
        return None

    def put(self, sizes: Hashable, chosen: str, seconds: Mapping[str, float]) -> None:
        """Stores a choice for later processes."""

    def drop(self, sizes: Hashable) -> None:
        """Removes a choice, because the results of its engine were wrong."""


class SingleProcessBallot:
    """Decides for this process alone. engine_agreement.py has the subclass for several processes."""

    def decide(self, sizes: Hashable, seconds: Mapping[str, float]) -> str | None:
        """Returns the engine that all processes use for a class of sizes; None while other processes have not decided: call again.

        Args:
            sizes: the bounds of the class.
            seconds: the time of each engine that agrees with eager mode in this process, on any scale.
        """
        return min(seconds, key=seconds.__getitem__)


class Contest:
    """The engines of a graph, with their checks and timings.

    Thread-safe: one thread at a time makes trials (checks and timings), and eager mode serves the other threads meanwhile.

    Args:
        graph: the name of the graph.
        eager: TorchDynamo's graph, run by torch.
        engines: the compiled engines by name. Eager mode is among them if it may be selected.
        left_out: for each engine that does not compete, the reason.
        device: the device that does most of the graph's work.
        training: True if a backward pass may follow a call.
        written: the positions of the inputs that the graph writes to.
        choices: the choices of earlier processes.
        ballot: decides, for this process or for several.

    Attributes:
        agreeing: the engines that agree with eager mode, by sizes.
        classes: the classes of sizes, by bounds.
        serving: the selected engine, by sizes. Calls read it without the lock.
    """

    def __init__(
        self, graph: str, eager: Call, engines: Mapping[str, Call], left_out: Mapping[str, str], device: torch.device, training: bool,
        written: Collection[int] = (), choices: Choices | None = None, ballot: SingleProcessBallot | None = None,
    ) -> None:  # fmt: skip
        self.default_engine = DEFAULT_ENGINE if DEFAULT_ENGINE in engines else EAGER
        self.graph, self.eager, self.device, self.training = graph, eager, device, training
        self.engines, self.left_out = dict(engines), dict(left_out)
        self.written = frozenset(written)
        self.choices, self.ballot = choices or Choices(), ballot or SingleProcessBallot()
        self.agreeing: dict[Any, set[str]] = {}
        self.classes: dict[Any, SizeClass] = {}
        self.serving: dict[Any, Call] = {}
        self._lock = forks.lock()
        self._in_trial = False

    def call(self, sizes: tuple[Any, ...], args: Sequence[Any]) -> Any:
        """Serves a user's call with sizes for which no engine is in `serving` yet."""
        if obstacles.call_must_run_once(args):
            return self.eager(*args)
        with self._lock:
            was_in_trial, self._in_trial = self._in_trial, True
        if was_in_trial:  # another thread makes a trial; or this thread does, and a kernel in the trial calls the graph
            return self.eager(*args)
        try:
            return self._try(sizes, args)
        finally:
            self._in_trial = False

    def _try(self, sizes: tuple[Any, ...], args: Sequence[Any]) -> Any:
        if len(self.agreeing) > _MAX_SIZES:
            self.agreeing.clear()
            self.serving.clear()
        plain = [size[1] if isinstance(size, tuple) else size for size in sizes]  # `Sizes.key` has (type, number) for a number
        bounds = tuple(max(_SMALLEST_BOUND, 1 << (size - 1).bit_length()) if type(size) is int else size for size in plain)
        size_class = self.classes.get(bounds)
        if size_class is None:
            size_class = self.classes[bounds] = SizeClass(self, bounds)
        agreeing = self.agreeing.setdefault(sizes, {EAGER})
        size_class.drop_excluded()
        size_class.count_other_sizes(sizes)
        if size_class.winner is None:
            size_class.decide_early()
        candidates = [size_class.winner] if size_class.winner is not None else list(size_class.remaining)
        unchecked = [name for name in candidates if name not in agreeing]
        if unchecked:
            ready = [name for name in unchecked if not size_class.is_postponed(name)]
            return self._check(size_class, agreeing, size_class.least_checked(ready), args) if ready else self.eager(*args)
        if size_class.winner is not None:
            self.serving[sizes] = self.engines.get(size_class.winner, self.eager)
            return self.serving[sizes](*args)
        return size_class.serve_and_time(sizes, args)

    def _check(self, size_class: SizeClass, agreeing: set[str], name: str, args: Sequence[Any]) -> Any:
        """Serves a call by eager mode, and checks one engine on clones of the inputs."""
        metrics.add("trials")
        try:
            inputs = clones(args)
            expected = Expected(self.eager, args, self.device, True, self.written) if self.training else None
        except Exception as error:  # too little memory, or a graph that writes to a tensor whose clone is a leaf that requires gradients
            results = self.eager(*args)
            size_class.select_untested(f"the graph cannot run on copies of its inputs: {first_line(error)}")
            return results
        if expected is None:  # outside of the try statement: an exception of eager mode goes to the user
            expected = Expected(self.eager, args, self.device, False, self.written)
        before = metrics.snapshot()
        try:
            trial = run(self.engines[name], inputs, self.device, self.training)
            after = metrics.snapshot()
            is_compiling = after.get("meanwhile", 0) > before.get("meanwhile", 0)
            difference = "" if is_compiling else expected.difference(trial)
        except Exception as error:
            self.exclude(name, f"it failed: {first_line(error)}")
        else:
            if is_compiling:
                size_class.postpone(name)
            elif difference:
                self.exclude(name, f"it is wrong: {difference}")
            else:
                agreeing.add(name)
                if all(after.get(work, 0) == before.get(work, 0) for work in ("trace", "compile")):
                    size_class.timings[name].ratios.append(trial.seconds / expected.run.seconds)
        return self.eager(*args) if self.training else expected.run.results

    def exclude(self, name: str, reason: str) -> None:
        """Excludes an engine from this graph."""
        self.left_out[name] = reason
        excluded = self.engines.pop(name)
        for agreeing in self.agreeing.values():
            agreeing.discard(name)
        for sizes in [sizes for sizes, call in self.serving.items() if call is excluded]:
            del self.serving[sizes]


class SizeClass:
    """A class of sizes, for which one engine is selected.

    Args:
        contest: the contest of the graph.
        bounds: the upper bound of each dynamic size, and each number among the inputs that is no int.

    Attributes:
        winner: the selected engine; None before the decision.
        remaining: the engines that may still be selected.
    """

    def __init__(self, contest: Contest, bounds: tuple[Any, ...]) -> None:
        self.contest, self.bounds = contest, bounds
        self.remaining = list(contest.engines)
        self.timings = {name: Timing() for name in [*self.remaining, EAGER]}
        self.winner: str | None = None
        self._ranking: dict[str, float] = {}
        self._round = 0
        self._order: list[str] = []
        # The timed sizes, and the number of successive calls with other sizes.
        self._sizes: tuple[Any, ...] | None = None
        self._calls_with_other_sizes = 0
        # For each engine that was not ready: the number of calls until its next check, and the length of this pause.
        self._postponed: dict[str, tuple[int, int]] = {}
        # The arguments of `_decide`, while other processes have not decided.
        self._measured: tuple[Mapping[str, float], str, Mapping[str, float]] | None = None
        choice = contest.choices.find(bounds)
        if choice is not None and choice[0] in contest.engines:
            self._win(choice[0], "the fastest in an earlier process", choice[1], is_stored=True)

    def drop_excluded(self) -> None:
        """Removes engines that the contest has excluded, for instance because of wrong results with other sizes."""
        contest = self.contest
        self.remaining = [name for name in self.remaining if name in contest.engines]
        self._order = [name for name in self._order if name in contest.engines]
        if self.winner is not None and self.winner not in contest.engines and self.winner != EAGER:
            remaining = {name: seconds for name, seconds in self._ranking.items() if name in contest.engines}
            contest.choices.drop(self.bounds)
            if remaining:
                self._win(
                    min(remaining, key=remaining.__getitem__), f"the fastest of the remaining engines, without {self.winner}", remaining
                )
            else:
                self.winner = None
        if self.winner is None and not self.remaining:
            self._win(EAGER, "no engine of the list agrees with eager mode", {})

    def count_other_sizes(self, sizes: tuple[Any, ...]) -> None:
        """Counts successive calls with other sizes than the timed sizes. After too many, timing starts again with the next sizes."""
        self._calls_with_other_sizes = self._calls_with_other_sizes + 1 if self._sizes not in (None, sizes) else 0
        if self._calls_with_other_sizes > _MAX_CALLS_WITH_OTHER_SIZES:
            self._sizes, self._round, self._order, self._calls_with_other_sizes = None, 0, [], 0
            for timing in self.timings.values():
                timing.calls.clear()
                timing.block = 0

    def select_untested(self, why: str) -> None:
        """Selects `Contest.default_engine`, the engine for graphs that must not be run twice, without a check."""
        self._win(self.contest.default_engine, why, {})
        for agreeing in self.contest.agreeing.values():
            agreeing.add(self.contest.default_engine)

    def least_checked(self, names: Sequence[str]) -> str:
        """Returns the engine with the fewest timed checks."""
        return min(names, key=lambda name: len(self.timings[name].ratios))

    def is_postponed(self, name: str) -> bool:
        """True if the check of an engine is postponed beyond this call. Counts the call."""
        calls, pause = self._postponed.get(name, (0, 0))
        if not calls:
            return False
        self._postponed[name] = (calls - 1, pause)
        return True

    def postpone(self, name: str) -> None:
        """Postpones the check of an engine that is not ready, for twice as many calls as the last time."""
        pause = min(2 * self._postponed.get(name, (0, 1))[1], _MAX_PAUSE)
        self._postponed[name] = (pause, pause)

    def decide_early(self) -> None:
        """Decides without more timing if other processes had not decided yet, if only one engine remains, or from the times of checks.

        The times of checks decide if no sizes are timed, and each engine has enough timed checks.
        """
        contest = self.contest
        if self._measured is not None:  # other processes had not decided yet
            self._decide(*self._measured)
        elif len(self.remaining) == 1 and self.remaining[0] != EAGER:
            (name,) = self.remaining
            if any(name in agreeing for agreeing in contest.agreeing.values()):
                self._decide({name: 1.0}, "no other engine is left", seconds={})
        elif self.remaining == [EAGER]:
            self._decide({EAGER: 1.0}, "no other engine is left", seconds={})
        elif self._sizes is None:
            ratios = {name: self.timings[name].ratios for name in self.remaining if name != EAGER}
            if ratios and all(len(values) >= _MIN_CHECKS for values in ratios.values()):
                medians = {name: statistics.median(values) for name, values in ratios.items()}
                self._decide(
                    medians | ({EAGER: 1.0} if EAGER in self.remaining else {}), "the fastest in the checks of several sizes", seconds={}
                )

    def serve_and_time(self, sizes: tuple[Any, ...], args: Sequence[Any]) -> Any:
        """Serves a call with sizes for which all remaining engines agree with eager mode, and times one of these engines."""
        contest = self.contest
        if self._sizes is None:
            self._sizes = sizes
        if self._sizes != sizes:
            return contest.eager(*args)
        if not self._order:
            self._begin_round()
        if not self._order:  # all rounds are over
            self._finish()
            return contest.eager(*args)
        name = self._order[0]
        timing = self.timings[name]
        engine = contest.engines[name]
        try:
            if contest.training:
                results, seconds = None, self._seconds_on_clones(engine, args)
            else:
                start = now(contest.device)
                results = engine(*args)
                seconds = now(contest.device) - start
        except Exception as error:
            if name == EAGER or (contest.written and not contest.training):  # eager mode cannot repeat a call that may have changed inputs
                raise
            results = contest.eager(*args)  # raises an exception, too, if the error is in the user's code
            contest.exclude(name, f"it failed: {first_line(error)}")
            return results
        timing.block += 1
        skipped = 2 if self._round == 1 else 1
        if timing.block > skipped:
            timing.calls.append(seconds)
        if timing.calls and timing.block >= skipped + next(count for bound, count in _CALLS_PER_BLOCK if timing.best < bound):
            timing.block = 0
            self._order.pop(0)
            if not self._order:
                self._begin_round()
                if not self._order:
                    self._finish()
        return contest.eager(*args) if contest.training else results

    def _seconds_on_clones(self, engine: Call, args: Sequence[Any]) -> float:
        """Runs an engine forward and backward, and returns the seconds. Inputs with hooks or to which the graph writes are clones."""
        metrics.add("trials")
        contest = self.contest
        hooked = {position for position, item in enumerate(args) if isinstance(item, torch.Tensor) and private.has_hooks(item)}
        return run(engine, clones(args, contest.written | hooked), contest.device, True).seconds

    def _begin_round(self) -> None:
        """Removes slow engines, and begins the next round. If enough has been timed, `_order` stays empty instead."""
        if self._round:
            bound = _MAX_SLOWDOWNS[min(self._round, len(_MAX_SLOWDOWNS)) - 1] * min(self.timings[name].best for name in self.remaining)
            self.remaining = [name for name in self.remaining if self.timings[name].best <= bound]
        timed = sum(sum(timing.calls) for timing in self.timings.values())
        fastest = sorted(self.timings[name].best for name in self.remaining)
        is_close = len(fastest) > 1 and fastest[1] < _MAX_SLOWDOWNS[-1] * fastest[0]
        enough = self._round >= _MIN_ROUNDS and timed > (_MIN_SECONDS_IF_CLOSE if is_close else _MIN_SECONDS)
        if len(self.remaining) <= 1 or self._round == _MAX_ROUNDS or enough:
            return
        self._round += 1
        self._order = self.remaining[:] if self._round % 2 else self.remaining[::-1]

    def _finish(self) -> None:
        seconds = {name: timing.best for name, timing in self.timings.items() if timing.calls and name in self.contest.engines}
        self._decide(seconds, "the fastest", seconds=seconds)

    def _decide(self, measure: Mapping[str, float], why: str, seconds: Mapping[str, float]) -> None:
        """Selects an engine, unless other processes have not yet decided.

        Args:
            measure: the time of each engine, on any scale.
            why: the reason for the verdict.
            seconds: the time of each engine that was timed.
        """
        self._measured = measure, why, seconds
        allowed = {name: value for name, value in measure.items() if name == EAGER or name in self.contest.engines}
        name = self.contest.ballot.decide(self.bounds, allowed or {EAGER: 1.0})
        if name is not None:
            self._measured = None
            self._win(name, why, measure, seconds=seconds)
            self.contest.choices.put(self.bounds, name, seconds)

    def _win(
        self, name: str, why: str, ranking: Mapping[str, float], *, seconds: Mapping[str, float] | None = None, is_stored: bool = False
    ) -> None:
        """Selects an engine, and records the verdict.

        Args:
            name: the engine's name.
            why: the reason for the verdict.
            ranking: the times of all engines. If `name` is excluded later, the fastest of the others is selected.
            seconds: the times to report; None to report `ranking`.
            is_stored: True if an earlier process made the measurement.
        """
        self.winner, self._ranking = name, dict(ranking)
        reported = dict(ranking if seconds is None else seconds)
        phase = "training" if self.contest.training else "inference"
        record_verdict(Verdict(self.contest.graph, phase, self.bounds, name, why, reported, dict(self.contest.left_out), is_stored))


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message: of the compiler's error, if TorchDynamo has wrapped one."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException):
        return first_line(inner)
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].rstrip()}" if lines else type(error).__name__
    return text if len(text) <= 200 else text[:199] + "…"
