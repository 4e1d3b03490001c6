"""The contest of engines for a graph: who is right, and of these who is fastest, found out in the calls of a user.

Each call is served by eager mode (TorchDynamo's graph as it is) or, once it has been checked with these sizes, by an engine. What a call
does beside, on copies of its inputs:

- check, once for each engine and each combination of sizes: the engine runs on clones, and everything that it did is compared with what
  eager mode did. One engine per call, so that a call takes about as long as eager mode and that engine together; in training, where
  gradients need a run of eager mode's own, one eager run more.
- time, in blocks of calls in turn. In inference nothing runs twice: the engines serve the calls. In training, where the backward pass comes
  when the user wants it, eager mode serves, and beside it an engine runs forward and backward.

Sizes that change are in classes, whose bounds are powers of two; who is fastest is decided once for a class. Where each call has other
sizes, so that none can be timed again, the checks' own times decide.

An engine that was wrong once, with whatever sizes, does not run this graph again.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import forks
from ..observe import metrics
from ..observe.verdicts import Verdict, note
from ..runtime import private
from . import obstacles
from .check import Call, Expected, now, run
from .clones import clones

EAGER = "eager"
# Who runs graphs that are not to be run twice.
UNTRIED = "dynaxla"
# Rounds of blocks: at least so many, and more, up to so many, until so many seconds have been timed. It takes more calls to tell engines of
# nearly the same speed apart.
_ROUNDS, _MOST_ROUNDS, _SECONDS, _SECONDS_IF_CLOSE = 3, 24, 1.0, 3.0
# An engine so much slower than the fastest one, after the first round, the second and so on, is not timed again.
_HOPELESS = (2.0, 1.5, 1.25, 1.2, 1.15, 1.1)
# How many calls a block has by the seconds of a call, besides the first one, which finds caches that another engine has filled.
_CALLS = ((0.001, 8), (0.02, 5), (0.1, 3), (float("inf"), 2))
# Where sizes are new in every call: after so many checks of each engine, but for those in which it compiled, their times decide.
_CHECKS = 3
# The bound of the first class of sizes.
_LEAST = 16
# Of combinations of sizes it is remembered who is right.
_MOST_SIZES = 4096
# A check whose engine has not compiled yet (option compile="background") is tried again after so many calls, then after twice as many.
_LONGEST = 64
# So many calls in succession may have other sizes than those that are timed.
_PATIENCE = 16


@dataclass
class Timing:
    """Attributes: calls (seconds of those that were timed); block (how many calls the present block has had); ratios (of checks' seconds to
    eager mode's in the same call)."""

    calls: list[float] = field(default_factory=list)
    block: int = 0
    ratios: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Of the quickest third of calls, the mean: what else the machine does makes calls slower, never quicker."""
        return statistics.fmean(sorted(self.calls)[: max(1, len(self.calls) // 3)]) if self.calls else float("inf")


class Kept:
    """What earlier processes have found out: nothing. See kept_choices.py."""

    def find(self, sizes: Hashable) -> tuple[str, Mapping[str, float]] | None:
        """Who is fastest for sizes of a class, and what was measured."""
        return None

    def put(self, sizes: Hashable, chosen: str, seconds: Mapping[str, float]) -> None:
        """Keep it for later processes."""

    def drop(self, sizes: Hashable) -> None:
        """Forget it: the engine was wrong."""


class Alone:
    """Who decides, where no other process does: see ballots.py."""

    def decide(self, sizes: Hashable, seconds: Mapping[str, float]) -> str | None:
        """The engine that all processes take for sizes of a class; None while that is not known: it is asked again then.

        seconds: of those that are right here, on a scale of this process's own.
        """
        return min(seconds, key=seconds.__getitem__)


class Contest:
    """The engines of a graph, and what is known of them. Thread-safe: one thread at a time tries; eager mode serves others meanwhile.

    engines: by name; eager mode is among them if it may be taken. left_out: other engines, and why. written: positions of inputs that the
    graph writes to.
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
        # By sizes, who serves; read without the lock.
        self.serving: dict[Any, Call] = {}
        self._lock = forks.lock()
        self._busy = False

    def call(self, sizes: tuple[Any, ...], args: Sequence[Any]) -> Any:
        """A user's call with sizes that nobody serves yet."""
        if obstacles.now(args):
            return self.eager(*args)
        with self._lock:
            was_busy, self._busy = self._busy, True
        if was_busy:  # with another thread's trial, or with this one's own, from within a kernel
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
        """One engine on clones beside eager mode. Returns: eager mode's results."""
        metrics.add("trials")
        try:
            given = clones(args)
            expected = Expected(self.eager, args, self.device, True, self.written) if self.training else None
        except Exception as error:  # too little memory, or a graph that writes to what wants gradients, which clones do as leaves
            results = self.eager(*args)
            chapter.give_up(f"it cannot be tried on copies of its inputs: {first_line(error)}")
            return results
        if expected is None:  # what eager mode raises here is for the user
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
        """Leave an engine out from now on."""
        self.left_out[name] = reason
        lost = self.engines.pop(name)
        for agreed in self.agreed.values():
            agreed.discard(name)
        for sizes in [sizes for sizes, call in self.serving.items() if call is lost]:
            del self.serving[sizes]


class Class:
    """A class of sizes. Attributes: winner (None: not known yet); running (those that may win)."""

    def __init__(self, contest: Contest, bounds: tuple[Any, ...]) -> None:
        self.contest, self.bounds = contest, bounds
        self.running = list(contest.engines)
        self.timings = {name: Timing() for name in [*self.running, EAGER]}
        self.winner: str | None = None
        self._ranking: dict[str, float] = {}
        self._round = 0
        self._order: list[str] = []
        # Those that are timed, and how many calls in succession have had others.
        self._sizes: tuple[Any, ...] | None = None
        self._others = 0
        self._waiting: dict[str, tuple[int, int]] = {}
        # What this process can say, until it is known who is taken.
        self._measured: tuple[Mapping[str, float], str, Mapping[str, float]] | None = None
        found = contest.kept.find(bounds)
        if found is not None and found[0] in contest.engines:
            self._win(found[0], "an earlier process found it to be the fastest", found[1], kept=True)

    def drop_lost(self) -> None:
        """Go on without engines that have been wrong with other sizes."""
        contest = self.contest
        self.running = [name for name in self.running if name in contest.engines]
        self._order = [name for name in self._order if name in contest.engines]
        if self.winner is not None and self.winner not in contest.engines and self.winner != EAGER:
            left = {name: seconds for name, seconds in self._ranking.items() if name in contest.engines}
            contest.kept.drop(self.bounds)
            if left:
                self._win(min(left, key=left.__getitem__), f"the fastest of those that are left, without {self.winner}", left)
            else:
                self.winner = None
        if self.winner is None and not self.running:
            self._win(EAGER, "no engine of the list does what eager mode does", {})

    def meet(self, sizes: tuple[Any, ...]) -> None:
        """Count calls with other sizes than those that are timed; after too many, these are not to be waited for."""
        self._others = self._others + 1 if self._sizes not in (None, sizes) else 0
        if self._others > _PATIENCE:
            self._sizes, self._round, self._order, self._others = None, 0, [], 0
            for timing in self.timings.values():
                timing.calls.clear()
                timing.block = 0

    def give_up(self, why: str) -> None:
        """Take the engine that others are compared beside, without a trial."""
        self._win(self.contest.untried, why, {})
        for agreed in self.contest.agreed.values():
            agreed.add(self.contest.untried)

    def least_checked(self, names: Sequence[str]) -> str:
        return min(names, key=lambda name: len(self.timings[name].ratios))

    def waits(self, name: str) -> bool:
        """Whether an engine that was not ready is to be left alone in this call, too."""
        calls, pause = self._waiting.get(name, (0, 0))
        if not calls:
            return False
        self._waiting[name] = (calls - 1, pause)
        return True

    def put_off(self, name: str) -> None:
        """An engine is not ready."""
        pause = min(2 * self._waiting.get(name, (0, 1))[1], _LONGEST)
        self._waiting[name] = (pause, pause)

    def conclude_early(self) -> None:
        """Decide where nothing is to be timed, or, by the checks' times, where sizes are hardly ever the same twice."""
        contest = self.contest
        if self._measured is not None:  # other processes had not measured yet
            self._decide(*self._measured)
        elif len(self.running) == 1 and self.running[0] != EAGER:
            (name,) = self.running
            if any(name in agreed for agreed in contest.agreed.values()):
                self._decide({name: 1.0}, "no other one is left", seconds={})
        elif self.running == [EAGER]:
            self._decide({EAGER: 1.0}, "no other one is left", seconds={})
        elif self._sizes is None:
            ratios = {name: self.timings[name].ratios for name in self.running if name != EAGER}
            if ratios and all(len(found) >= _CHECKS for found in ratios.values()):
                found = {name: statistics.median(each) for name, each in ratios.items()} | ({EAGER: 1.0} if EAGER in self.running else {})
                self._decide(found, "the fastest in the checks of several sizes", seconds={})

    def time(self, sizes: tuple[Any, ...], args: Sequence[Any]) -> Any:
        """A call whose engines are all right with its sizes."""
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
            if name == EAGER or (contest.written and not contest.training):  # else nothing has been written
                raise
            results = contest.eager(*args)  # for a mistake of the user's, it raises the same
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
        """Seconds of an engine forward and backward, before the call itself."""
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
    """The kind of an error and the first line of its message, of what a compiler raised rather than of TorchDynamo's wrapping."""
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, BaseException):
        return first_line(inner)
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return text if len(text) <= 200 else text[:199] + "…"
