"""The contest of engines for a graph. It finds, during the user's calls, which engines are right, and which of these is the fastest.

Each call is served by eager mode (TorchDynamo's graph as it is), or by an engine that has been checked with these sizes. A call may do
additional work on copies of its inputs:

- A check, once for each engine and each combination of sizes: the engine runs on clones, and its results and side effects are compared with
  those of eager mode. One call checks one engine, so that it takes about as long as eager mode and that engine together. In training, where
  the gradients need an eager run of their own, it takes one more eager run.
- Timing, in blocks of calls that alternate between engines. In inference nothing runs twice: the engines serve the calls. In training,
  where the user decides when the backward pass runs, eager mode serves the call, and an engine runs forward and backward additionally.

Dynamic sizes are grouped into classes, whose bounds are powers of two. The fastest engine is decided once for a class. If each call has
other sizes, so that no engine can be timed twice with the same ones, the times of the checks decide.

An engine that was wrong once, with any sizes, does not run this graph again.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import forks
from ..observe import metrics
from ..observe.engine_decisions import Verdict, note
from ..runtime import private
from . import obstacles
from .clones import clones
from .verification import Call, Expected, now, run

EAGER = "eager"
# The engine for graphs that must not be run twice.
UNTRIED = "dynaxla"
# Rounds of timed blocks: the minimum and the maximum number of rounds, and the timed seconds after which no further round begins. It takes
# more seconds to tell engines of nearly the same speed apart.
_ROUNDS, _MOST_ROUNDS, _SECONDS, _SECONDS_IF_CLOSE = 3, 24, 1.0, 3.0
# After the first round, the second and so on: an engine that takes more than this multiple of the fastest engine's time is not timed again.
_HOPELESS = (2.0, 1.5, 1.25, 1.2, 1.15, 1.1)
# The number of calls of a block, by an upper bound of the seconds of a call. The first call, whose caches another engine has filled, is not
# counted.
_CALLS = ((0.001, 8), (0.02, 5), (0.1, 3), (float("inf"), 2))
# If sizes are new in every call, the times of the checks decide after this number of checks of each engine. Checks in which the engine
# compiled do not count.
_CHECKS = 3
# The bound of the first class of sizes.
_LEAST = 16
# The number of combinations of sizes for which the engines that agree with eager mode are remembered.
_MOST_SIZES = 4096
# A check of an engine that has not compiled yet (option compile="background") is repeated after 2 calls, then 4, 8, ..., up to this number.
_LONGEST = 64
# The number of successive calls that may have other sizes than the timed ones before timing starts again with other sizes.
_PATIENCE = 16


@dataclass
class Timing:
    """The timings of one engine.

    Attributes:
        calls: the seconds of the timed calls.
        block: the number of calls of the current block so far.
        ratios: for each check, the engine's seconds divided by those of eager mode in the same call.
    """

    calls: list[float] = field(default_factory=list)
    block: int = 0
    ratios: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """The mean of the fastest third of the calls, since other load on the machine makes calls slower, never faster."""
        return statistics.fmean(sorted(self.calls)[: max(1, len(self.calls) // 3)]) if self.calls else float("inf")


class Kept:
    """The choices of earlier processes. This base class has none; see stored_choices.py."""

    def find(self, sizes: Hashable) -> tuple[str, Mapping[str, float]] | None:
        """Returns the fastest engine for a class of sizes, and the measured seconds; None if there is no choice."""
        return None

    def put(self, sizes: Hashable, chosen: str, seconds: Mapping[str, float]) -> None:
        """Stores a choice for later processes."""

    def drop(self, sizes: Hashable) -> None:
        """Removes a choice, since its engine was wrong."""


class Alone:
    """Decides for this process alone. See engine_agreement.py for several processes."""

    def decide(self, sizes: Hashable, seconds: Mapping[str, float]) -> str | None:
        """Returns the engine that all processes use for a class of sizes; None while it is not known, so that the caller asks again.

        Args:
            seconds: the times of the engines that are right in this process, on a scale of its own.
        """
        return min(seconds, key=seconds.__getitem__)


class Contest:
    """The engines of a graph, with their checks and timings.

    Thread-safe: one thread at a time makes trials, and eager mode serves the other threads meanwhile.

    Args:
        graph: the name of the graph.
        eager: TorchDynamo's graph, run by torch.
        engines: the compiled engines by name. Eager mode is among them if it may be selected.
        left_out: the reason for each other engine.
        written: the positions of the inputs that the graph writes to.
        kept: the choices of earlier processes.
        ballot: decides, for this process or for several.
    """

    def __init__(
        self, graph: str, eager: Call, engines: Mapping[str, Call], left_out: Mapping[str, str], device: torch.device, training: bool,
        written: Collection[int] = (), kept: Kept | None = None, ballot: Alone | None = None,
    ) -> None:  # fmt: skip
        self.untried = UNTRIED if UNTRIED in engines else EAGER
        self.graph, self.eager, self.device, self.training = graph, eager, device, training
        self.engines, self.left_out = dict(engines), dict(left_out)
        self.written = frozenset(written)
        self.kept, self.ballot = kept or Kept(), ballot or Alone()
        self.agreed: dict[Any, set[str]] = {}
        self.classes: dict[Any, Class] = {}
        # The serving engine by sizes; read without the lock.
        self.serving: dict[Any, Call] = {}
        self._lock = forks.lock()
        self._busy = False

    def call(self, sizes: tuple[Any, ...], args: Sequence[Any]) -> Any:
        """Serves a user's call with sizes for which there is no serving engine yet."""
        if obstacles.call_must_run_once(args):
            return self.eager(*args)
        with self._lock:
            was_busy, self._busy = self._busy, True
        if was_busy:  # another thread makes a trial, or this thread does, if a kernel calls the graph again
            return self.eager(*args)
        try:
            return self._try(sizes, args)
        finally:
            self._busy = False

    def _try(self, sizes: tuple[Any, ...], args: Sequence[Any]) -> Any:
        if len(self.agreed) > _MOST_SIZES:
            self.agreed.clear()
            self.serving.clear()
        plain = [size[1] if isinstance(size, tuple) else size for size in sizes]  # as `Sizes.key` gives them
        bounds = tuple(max(_LEAST, 1 << (size - 1).bit_length()) if type(size) is int else size for size in plain)
        chapter = self.classes.get(bounds)
        if chapter is None:
            chapter = self.classes[bounds] = Class(self, bounds)
        agreed = self.agreed.setdefault(sizes, {EAGER})
        chapter.drop_lost()
        chapter.meet(sizes)
        if chapter.winner is None:
            chapter.conclude_early()
        wanted = [chapter.winner] if chapter.winner is not None else list(chapter.running)
        unchecked = [name for name in wanted if name not in agreed]
        if unchecked:
            ready = [name for name in unchecked if not chapter.waits(name)]
            return self._check(chapter, agreed, chapter.least_checked(ready), args) if ready else self.eager(*args)
        if chapter.winner is not None:
            self.serving[sizes] = self.engines.get(chapter.winner, self.eager)
            return self.serving[sizes](*args)
        return chapter.time(sizes, args)

    def _check(self, chapter: Class, agreed: set[str], name: str, args: Sequence[Any]) -> Any:
        """Checks one engine on clones of the inputs, and returns the results of eager mode."""
        metrics.add("trials")
        try:
            given = clones(args)
            expected = Expected(self.eager, args, self.device, True, self.written) if self.training else None
        except Exception as error:  # too little memory, or a graph that writes to a tensor whose clone is a leaf that requires gradients
            results = self.eager(*args)
            chapter.give_up(f"it cannot run on copies of its inputs: {first_line(error)}")
            return results
        if expected is None:  # outside of the try statement: an exception of eager mode goes to the user
            expected = Expected(self.eager, args, self.device, False, self.written)
        before = metrics.snapshot()
        try:
            mine = run(self.engines[name], given, self.device, self.training)
            after = metrics.snapshot()
            is_late = after.get("meanwhile", 0) > before.get("meanwhile", 0)
            difference = "" if is_late else expected.difference(mine)
        except Exception as error:
            self.lose(name, f"it failed: {first_line(error)}")
        else:
            if is_late:
                chapter.put_off(name)
            elif difference:
                self.lose(name, f"it is wrong: {difference}")
            else:
                agreed.add(name)
                if all(after.get(work, 0) == before.get(work, 0) for work in ("trace", "compile")):
                    chapter.timings[name].ratios.append(mine.seconds / expected.run.seconds)
        return self.eager(*args) if self.training else expected.run.results

    def lose(self, name: str, reason: str) -> None:
        """Leaves an engine out from now on."""
        self.left_out[name] = reason
        lost = self.engines.pop(name)
        for agreed in self.agreed.values():
            agreed.discard(name)
        for sizes in [sizes for sizes, call in self.serving.items() if call is lost]:
            del self.serving[sizes]


class Class:
    """A class of sizes.

    Attributes:
        winner: the selected engine; None while it is not known.
        running: the engines that may still win.
    """

    def __init__(self, contest: Contest, bounds: tuple[Any, ...]) -> None:
        self.contest, self.bounds = contest, bounds
        self.running = list(contest.engines)
        self.timings = {name: Timing() for name in [*self.running, EAGER]}
        self.winner: str | None = None
        self._ranking: dict[str, float] = {}
        self._round = 0
        self._order: list[str] = []
        # The sizes that are timed, and the number of successive calls with other sizes.
        self._sizes: tuple[Any, ...] | None = None
        self._others = 0
        self._waiting: dict[str, tuple[int, int]] = {}
        # The measurements of this process, until all processes have decided.
        self._measured: tuple[Mapping[str, float], str, Mapping[str, float]] | None = None
        found = contest.kept.find(bounds)
        if found is not None and found[0] in contest.engines:
            self._win(found[0], "an earlier process found it to be the fastest", found[1], kept=True)

    def drop_lost(self) -> None:
        """Removes engines that were wrong with other sizes."""
        contest = self.contest
        self.running = [name for name in self.running if name in contest.engines]
        self._order = [name for name in self._order if name in contest.engines]
        if self.winner is not None and self.winner not in contest.engines and self.winner != EAGER:
            left = {name: seconds for name, seconds in self._ranking.items() if name in contest.engines}
            contest.kept.drop(self.bounds)
            if left:
                self._win(min(left, key=left.__getitem__), f"the fastest of the remaining engines, without {self.winner}", left)
            else:
                self.winner = None
        if self.winner is None and not self.running:
            self._win(EAGER, "no engine of the list agrees with eager mode", {})

    def meet(self, sizes: tuple[Any, ...]) -> None:
        """Counts successive calls with other sizes than the timed ones. After too many, timing starts again with other sizes."""
        self._others = self._others + 1 if self._sizes not in (None, sizes) else 0
        if self._others > _PATIENCE:
            self._sizes, self._round, self._order, self._others = None, 0, [], 0
            for timing in self.timings.values():
                timing.calls.clear()
                timing.block = 0

    def give_up(self, why: str) -> None:
        """Selects the engine for graphs that must not be run twice, without a trial."""
        self._win(self.contest.untried, why, {})
        for agreed in self.contest.agreed.values():
            agreed.add(self.contest.untried)

    def least_checked(self, names: Sequence[str]) -> str:
        return min(names, key=lambda name: len(self.timings[name].ratios))

    def waits(self, name: str) -> bool:
        """True if an engine that was not ready should not be checked in this call either. Counts the call."""
        calls, pause = self._waiting.get(name, (0, 0))
        if not calls:
            return False
        self._waiting[name] = (calls - 1, pause)
        return True

    def put_off(self, name: str) -> None:
        """Postpones the check of an engine that is not ready, each time for twice as many calls."""
        pause = min(2 * self._waiting.get(name, (0, 1))[1], _LONGEST)
        self._waiting[name] = (pause, pause)

    def conclude_early(self) -> None:
        """Decides where only one engine is left, or by the times of the checks where sizes rarely repeat."""
        contest = self.contest
        if self._measured is not None:  # other processes had not measured yet
            self._decide(*self._measured)
        elif len(self.running) == 1 and self.running[0] != EAGER:
            (name,) = self.running
            if any(name in agreed for agreed in contest.agreed.values()):
                self._decide({name: 1.0}, "no other engine is left", seconds={})
        elif self.running == [EAGER]:
            self._decide({EAGER: 1.0}, "no other engine is left", seconds={})
        elif self._sizes is None:
            ratios = {name: self.timings[name].ratios for name in self.running if name != EAGER}
            if ratios and all(len(found) >= _CHECKS for found in ratios.values()):
                found = {name: statistics.median(each) for name, each in ratios.items()} | ({EAGER: 1.0} if EAGER in self.running else {})
                self._decide(found, "the fastest in the checks of several sizes", seconds={})

    def time(self, sizes: tuple[Any, ...], args: Sequence[Any]) -> Any:
        """Serves a call for whose sizes all engines are right, and times an engine."""
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
                results, seconds = None, self._beside(engine, args)
            else:
                start = now(contest.device)
                results = engine(*args)
                seconds = now(contest.device) - start
        except Exception as error:
            if name == EAGER or (contest.written and not contest.training):  # inputs may have been written to
                raise
            results = contest.eager(*args)  # raises again if the mistake is the user's
            contest.lose(name, f"it failed: {first_line(error)}")
            return results
        timing.block += 1
        skipped = 2 if self._round == 1 else 1
        if timing.block > skipped:
            timing.calls.append(seconds)
        if timing.calls and timing.block >= skipped + next(count for bound, count in _CALLS if timing.best < bound):
            timing.block = 0
            self._order.pop(0)
            if not self._order:
                self._begin_round()
                if not self._order:
                    self._finish()
        return contest.eager(*args) if contest.training else results

    def _beside(self, engine: Call, args: Sequence[Any]) -> float:
        """Runs an engine forward and backward on clones, and returns the seconds."""
        metrics.add("trials")
        contest = self.contest
        hooked = {place for place, item in enumerate(args) if isinstance(item, torch.Tensor) and private.has_hooks(item)}
        return run(engine, clones(args, contest.written | hooked), contest.device, True).seconds

    def _begin_round(self) -> None:
        if self._round:
            bound = _HOPELESS[min(self._round, len(_HOPELESS)) - 1] * min(self.timings[name].best for name in self.running)
            self.running = [name for name in self.running if self.timings[name].best <= bound]
        timed = sum(sum(timing.calls) for timing in self.timings.values())
        fastest = sorted(self.timings[name].best for name in self.running)
        is_close = len(fastest) > 1 and fastest[1] < _HOPELESS[-1] * fastest[0]
        enough = self._round >= _ROUNDS and timed > (_SECONDS_IF_CLOSE if is_close else _SECONDS)
        if len(self.running) <= 1 or self._round == _MOST_ROUNDS or enough:
            return
        self._round += 1
        self._order = self.running[:] if self._round % 2 else self.running[::-1]

    def _finish(self) -> None:
        found = {name: timing.best for name, timing in self.timings.items() if timing.calls and name in self.contest.engines}
        self._decide(found, "the fastest", seconds=found)

    def _decide(self, measure: Mapping[str, float], why: str, seconds: Mapping[str, float]) -> None:
        self._measured = measure, why, seconds
        right = {name: value for name, value in measure.items() if name == EAGER or name in self.contest.engines}
        name = self.contest.ballot.decide(self.bounds, right or {EAGER: 1.0})
        if name is not None:
            self._measured = None
            self._win(name, why, measure, seconds=seconds)
            self.contest.kept.put(self.bounds, name, seconds)

    def _win(
        self, name: str, why: str, ranking: Mapping[str, float], *, seconds: Mapping[str, float] | None = None, kept: bool = False
    ) -> None:
        self.winner, self._ranking = name, dict(ranking)
        shown = dict(ranking if seconds is None else seconds)
        phase = "training" if self.contest.training else "inference"
        note(Verdict(self.contest.graph, phase, self.bounds, name, why, shown, dict(self.contest.left_out), kept))


def first_line(error: BaseException) -> str:
    """Returns the type of an error and the first line of its message. TorchDynamo's wrapping of a compiler's error is removed."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException):
        return first_line(inner)
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return text if len(text) <= 200 else text[:199] + "…"
