"""Compares the collectives of programs among processes before a program's first run. Without this check, processes with different
collectives would deadlock, or combine unrelated tensors.

The processes compare the sequence of collectives over each process group, not whole programs: one process may have them in two programs
(because it read a value in between), another in one. Each process counts the collectives that its programs have called over a group. In a
program's first run it posts the program's next collectives to the group's store, under that count, and waits until every other process of
the group has posted the same ones. A process whose program has run before posts and compares nothing. But if its collective does not return
within `_SOON`, a thread looks into the store and answers processes that ask. A collective of a step in eager mode counts as a program with
one collective (`call_alone`). On a GPU, where the host does not wait for it, it is posted without being asked for.

A program whose collectives XLA itself executes compares them before it is compiled.

Collectives are not compared if all programs that contain them have run before, or if they are called outside of programs and steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch

from .. import forks
from ..errors import CollectiveFailed, CollectiveMismatch
from ..observe import metrics
from . import private
from .cache import LeastRecentlyUsed

# Seconds: how long a collective takes before its process looks for questions of other processes; and how long a process whose collective
# has failed waits for posts of the others.
_SOON, _LAST = 0.1, 1.0
# The number of recent collectives of a group that a process can still report. A process can run ahead by collectives in which it need not
# wait, as the source of a broadcast.
_MOST_RECENT = 256
# The most collectives that an exception names if one of several has failed.
_MOST_NAMED = 3


@dataclass(frozen=True)
class Collective:
    """A collective of a program.

    Attributes:
        group: The name of its process group.
        kind: The kind of op.
        settings: Further arguments that must be equal on all processes.
        tensors: The dtypes and shapes of its tensors, such as "f32[4, 8]".
        splits: For all_to_all, the sizes sent to each process and the sizes received from each.
        where: The line of user code, if known.
        by: The caller, if it is not torch.
    """

    group: str
    kind: str
    settings: tuple[str, ...]
    tensors: tuple[str, ...]
    splits: tuple[tuple[int, ...], ...] = ()
    where: str = ""
    by: str = ""

    def fits(self, other: Collective, me: int, them: int) -> bool:
        """True if this collective of the group's process `me` and `other` of its process `them` match."""
        if (self.kind, self.settings, self.by) != (other.kind, other.settings, other.by):
            return False
        if not self.splits or not other.splits:
            return self.tensors == other.tensors and self.splits == other.splits
        (sent, received), (their_sent, their_received) = self.splits, other.splits
        same_rows = [_rows(text) for text in self.tensors] == [_rows(text) for text in other.tensors]
        return same_rows and sent[them] == their_received[me] and received[them] == their_sent[me]

    def __str__(self) -> str:
        splits = [f"sends {list(self.splits[0])}, gets {list(self.splits[1])}"] if self.splits else []
        called = f"{self.kind}({', '.join([*self.tensors, *self.settings, *splits])})"
        return " ".join([called, *([self.by] if self.by else []), *([f"at {self.where}"] if self.where else [])])


def _rows(text: str) -> str:
    """Returns the description of a tensor without its first dimension."""
    head, _, sizes = text.partition("[")
    return f"{head}[{sizes.partition(',')[2]}"


class ProgramCollectives:
    """The collectives of a program, in order. The processes of each group compare them in the program's first run."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self._is_settled = False

    def add(self, collective: Collective) -> int:
        """Appends a collective while the program is traced. Returns: its index."""
        self.collectives.append(collective)
        return len(self.collectives) - 1

    def run(self, index: int, start: Callable[[Any], Any], looks: bool) -> None:
        """Calls a collective, and waits for it.

        Args:
            index: The collective's index.
            start: Starts the collective on the process group; returns its Work.
            looks: Whether the wait lasts until the result is there, as on the CPU, so that other processes can be answered meanwhile.

        Raises: CollectiveMismatch; CollectiveFailed; exceptions of `start`.
        """
        collective = self.collectives[index]
        group = private.process_group(collective.group)
        channel = _channel_of(group)
        if not self._is_settled:
            is_first = all(item.group != collective.group for item in self.collectives[:index])
            channel.agree(self._from(index, collective.group), is_first, private.timeout_of(group))
            self._is_settled = index == len(self.collectives) - 1
        channel.begin(collective)
        work = start(group)
        try:
            # Another thread answers, because this one cannot wait in intervals: gloo's reduce_scatter takes no timeout.
            with contextlib.ExitStack() as waiting:
                if looks and channel.others:
                    waiting.enter_context(_watch.during(functools.partial(_answer, channel, self._from(index + 1, collective.group))))
                work.wait()
        except RuntimeError as error:
            raise channel.failed([collective], error, self._from(index + 1, collective.group)) from error
        except BaseException:  # Ctrl-C
            with contextlib.suppress(RuntimeError):
                work.wait()  # until the collective no longer writes to the program's memory
            raise

    # For programs whose collectives XLA itself executes

    def settle(self) -> None:
        """Compares all collectives of the program, unless that is done. Raises: CollectiveMismatch; CollectiveFailed."""
        for name in self._groups() if not self._is_settled else ():
            group = private.process_group(name)
            _channel_of(group).agree(self._from(0, name), True, private.timeout_of(group))
        self._is_settled = True

    @contextlib.contextmanager
    def under_way(self, cut: Callable[[], None]) -> Iterator[None]:
        """Surrounds a run of the program, in which XLA calls all of its collectives.

        cut: Makes the running collectives fail, on all processes.
        Raises: CollectiveMismatch or CollectiveFailed if a collective fails.
        """
        groups = {name: private.process_group(name) for name in self._groups()}
        channels = {name: _channel_of(group) for name, group in groups.items()}
        for collective in self.collectives:
            channels[collective.group].begin(collective)
        waiting = _IdleClock()
        end = ""

        def look() -> None:
            nonlocal end
            for channel in channels.values():
                if channel.others:
                    _answer(channel, [])
            seconds = max(map(private.timeout_of, groups.values()))
            if waiting.seconds() > seconds:
                end = f"it has not ended within {seconds:g} s, the group's timeout"
            if end or any(channel.differs for channel in channels.values()):
                cut()

        try:
            with _watch.during(look):
                yield
        except RuntimeError as error:
            if "Gloo" not in str(error):
                raise
            cut()
            raise self._failed(channels, RuntimeError(end) if end else error) from error

    def _failed(self, channels: dict[str, _Channel], error: Exception) -> Exception:
        found = [channel.failed(self._from(0, name), error) for name, channel in channels.items()]
        return next((item for item in found if isinstance(item, CollectiveMismatch)), found[0])

    def _groups(self) -> list[str]:
        return list(dict.fromkeys(item.group for item in self.collectives))

    def _from(self, index: int, group: str) -> list[Collective]:
        return [item for item in self.collectives[index:] if item.group == group]


def call_alone(collective: Collective, start: Callable[[Any], Any], looks: bool) -> None:
    """Calls a collective in eager mode, and waits for it. Another process may have the same collective in a program.

    For `start` and `looks` see `ProgramCollectives.run`. Raises: CollectiveMismatch; CollectiveFailed; exceptions of `start`.
    """
    channel = _channel_of(private.process_group(collective.group))
    if not looks:
        channel.post_next(collective)
    key = dataclasses.replace(collective, where="")
    agreement = channel.alone.get(key)
    if agreement is None:
        agreement = ProgramCollectives()
        agreement.add(collective)
        channel.alone.put(key, agreement)
    agreement.run(0, start, looks)


def _answer(channel: _Channel, coming: Sequence[Collective]) -> None:
    with contextlib.suppress(RuntimeError):  # the store may be gone before the group is
        channel.answer(coming)


class _Channel:
    """The state of this process in a process group. The *place* of a process is its rank within the group.

    Attributes:
        others: The places of the other processes; empty if the group has no store.
        alone: The collectives that were called in eager mode, each as a program with one collective.
    """

    def __init__(self, group: Any) -> None:
        """Creates the state. It must not keep a reference to the group, which is its key in a WeakKeyDictionary."""
        self._ranks = torch.distributed.get_process_group_ranks(group)
        self._me = int(group.rank())
        self._store = private.store_of(group)
        self.others = [place for place in range(len(self._ranks)) if place != self._me] if self._store is not None else []
        self._count = 0
        self._recent: deque[Collective] = deque(maxlen=_MOST_RECENT)
        self._round = 0
        # By place, the latest post of a process: the count of its first collective, and its collectives.
        self._said: dict[int, tuple[int, list[Collective]]] = {}
        self._answered: set[int] = set()
        self._looks = 0
        self._difference: CollectiveMismatch | None = None
        self.alone: LeastRecentlyUsed[ProgramCollectives] = LeastRecentlyUsed(_MOST_RECENT)

    @property
    def differs(self) -> bool:
        """True if another process has posted different collectives."""
        return self._difference is not None

    def begin(self, collective: Collective) -> None:
        """Records that a collective starts."""
        self._count += 1
        self._recent.append(collective)

    def post_next(self, collective: Collective) -> None:
        """Posts the next collective without being asked. On a GPU the host does not wait for it, and so could not answer later."""
        if not self.others:
            return
        with contextlib.suppress(RuntimeError):  # the store may be gone before the group is
            self._post(self._count, [collective])
            self._store.delete_key(f"dynaxla/{self._round}/{self._count - _MOST_RECENT}/{self._me}")
        self._answered.discard(self._count - _MOST_RECENT)

    def agree(self, coming: Sequence[Collective], is_first: bool, seconds: float) -> None:
        """Waits until all other processes have posted the same next collectives.

        Args:
            coming: The next collectives of this process.
            is_first: Whether the first of them is the first of its program over this group.
            seconds: The timeout.

        Raises: CollectiveMismatch; CollectiveFailed if a process does not post in time.
        """
        unheard = [place for place in self.others if not self._covers(place)]
        if not self.others or not (is_first or unheard):
            return
        try:
            self._post(self._count, coming)
            for place in self.others:
                if place not in unheard:
                    self._compare(place, self._count, coming)
            if unheard:
                self._ask()
                self._hear(unheard, coming, seconds)
            metrics.add("agreements")
        except CollectiveMismatch:
            self._start_anew()
            raise
        except RuntimeError as error:
            if isinstance(error, CollectiveFailed):
                raise
            raise CollectiveFailed(
                f"the store of the group of ranks {self._ranks} cannot be reached: {error}",
                op=str(coming[0]),
                hint="the process that runs the store, usually rank 0, has probably ended: read its log, and restart all processes",
            ) from error

    def _hear(self, unheard: list[int], coming: Sequence[Collective], seconds: float) -> None:
        end, pause = time.monotonic() + seconds, 0.001
        while True:
            unheard = [place for place in unheard if not self._listen(place, self._count, coming)]
            if not unheard:
                return
            if time.monotonic() > end:
                break
            self.answer(coming)  # others may ask about earlier collectives of this process
            if self._difference is not None:
                raise self._difference
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
        raise CollectiveFailed(
            f"{self._names(unheard)} of the group of ranks {self._ranks} did not reach a collective within {seconds:g} s, the group's "
            f"timeout: rank {self._ranks[self._me]} waits to compare it before the first run of its program",
            op=str(coming[0]),
            hint="check that this process is alive, and that it calls the same compiled step or model",
        )

    def answer(self, coming: Sequence[Collective]) -> None:
        """Posts the collectives that this process has called, and those that come next in its program, for processes that ask for them.

        Raises: RuntimeError of the store.
        """
        looks = self._store.add("dynaxla/asked", 0)
        if looks == self._looks:
            return
        all_answered = True
        for place in self.others:
            asked = self._read(f"asking/{place}")
            if asked is None or asked[0] != self._round:
                continue
            stretch = self._stretch(asked[1], coming)
            if not stretch:
                all_answered &= asked[1] < self._count
                continue
            if asked[1] not in self._answered:
                self._post(asked[1], stretch)
            try:
                self._listen(place, asked[1], stretch)
            except CollectiveMismatch as error:
                self._difference = error
        if all_answered:
            self._looks = looks

    def failed(self, begun: Sequence[Collective], error: Exception, coming: Sequence[Collective] = ()) -> Exception:
        """Returns the exception for a failed collective, after the other processes have had time to post theirs.

        Args:
            begun: The latest collectives, one of which has failed.
            error: The original error.
            coming: The collectives that come next.
        """
        place, stretch = self._count - len(begun), [*begun, *coming]
        unheard = list(self.others)
        with contextlib.suppress(RuntimeError):
            try:
                self._post(place, stretch)
                end = time.monotonic() + _LAST
                while unheard and self._difference is None and time.monotonic() < end:
                    unheard = [other for other in unheard if not self._listen(other, place, stretch)]
                    time.sleep(0.02)
            except CollectiveMismatch as difference:
                self._difference = difference
        if self._difference is not None:
            return self._difference
        silent = f"; no answer came from {self._names(unheard)}" if unheard and len(unheard) < len(self.others) else ""
        return CollectiveFailed(
            f"a collective of ranks {self._ranks} failed on rank {self._ranks[self._me]}: {_first_line(error)}{silent}",
            op=" or ".join(map(str, begun[:_MOST_NAMED])) + (" or a later one" if len(begun) > _MOST_NAMED else ""),
            hint="another process has ended, hangs, or calls something else: read its log; the program has written nothing, so save a "
            "checkpoint if you need one, and restart all processes, since the group cannot be used any more",
        )

    # Posts

    def _covers(self, place: int) -> bool:
        start, said = self._said.get(place, (0, ()))
        return start <= self._count < start + len(said)

    def _stretch(self, start: int, coming: Sequence[Collective]) -> list[Collective]:
        """Returns the known collectives of this process from a count on."""
        first = self._count - len(self._recent)
        return [*self._recent, *coming][start - first :] if start >= first else []

    def _post(self, start: int, stretch: Sequence[Collective]) -> None:
        self._answered.add(start)
        self._store.set(f"dynaxla/{self._round}/{start}/{self._me}", json.dumps([astuple(item) for item in stretch]))

    def _ask(self) -> None:
        self._store.set(f"dynaxla/asking/{self._me}", json.dumps([self._round, self._count]))
        self._store.add("dynaxla/asked", 1)

    def _read(self, key: str) -> Any:
        key = f"dynaxla/{key}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _listen(self, place: int, start: int, stretch: Sequence[Collective]) -> bool:
        """True if a process has posted its collectives from a count on. Raises: CollectiveMismatch if they differ from `stretch`."""
        found = self._read(f"{self._round}/{start}/{place}")
        if found is None:
            return False
        self._said[place] = start, [_collective(item) for item in found]
        self._compare(place, start, stretch)
        return True

    def _compare(self, place: int, start: int, stretch: Sequence[Collective]) -> None:
        said_from, said = self._said[place]
        for mine, theirs in zip(stretch, said[start - said_from :], strict=False):
            if not mine.fits(theirs, self._me, place):
                raise self._mismatch(place, mine, theirs)

    def _mismatch(self, place: int, mine: Collective, theirs: Collective) -> CollectiveMismatch:
        (me, my), (them, their) = sorted([(self._ranks[self._me], mine), (self._ranks[place], theirs)], key=lambda item: item[0])
        return CollectiveMismatch(
            f"ranks {me} and {them} of the group of ranks {self._ranks} call different collectives\n"
            f"  rank {me}: {my}\n  rank {them}: {their}",
            where=mine.where,
            hint="give all ranks inputs of the same sizes and dtypes (drop or pad the last batch), and let none skip a collective (an `if` "
            "on the rank, a module that only some use)",
        )

    def _start_anew(self) -> None:
        """Discards all posts after a mismatch, which all processes have seen."""
        self._round += 1
        self._said.clear()
        self._answered.clear()
        self._difference = None

    def _names(self, places: Sequence[int]) -> str:
        ranks = [self._ranks[place] for place in places]
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _collective(item: Sequence[Any]) -> Collective:
    group, kind, settings, tensors, splits, where, by = item
    return Collective(group, kind, tuple(settings), tuple(tensors), tuple(map(tuple, splits)), where, by)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# Keyed by the group object, because a later group may have the same name.
_channels: weakref.WeakKeyDictionary[Any, _Channel] = weakref.WeakKeyDictionary()


def _channel_of(group: Any) -> _Channel:
    return _channels.get(group) or _channels.setdefault(group, _Channel(group))  # one for all threads


class _IdleClock:
    """Measures how long this process has been idle, by its CPU time: a program that computes is not waiting."""

    def __init__(self) -> None:
        self._since = self._before = time.monotonic()
        self._cpu = time.process_time()

    def seconds(self) -> float:
        now, cpu = time.monotonic(), time.process_time()
        if cpu - self._cpu > _BUSY * (now - self._before):
            self._since = now
        self._before, self._cpu = now, cpu
        return now - self._since


# The fraction of one processor above which a process counts as computing.
_BUSY = 0.05


class _Watch:
    """A thread that wakes every `_SOON` seconds and calls the `look` functions of long-running programs. It rests while no program runs."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._under_way: dict[int, Callable[[], None]] = {}
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        # Held during a look, so that the block in `during` does not end meanwhile.
        self._lock = forks.lock()

    @contextlib.contextmanager
    def during(self, look: Callable[[], None]) -> Iterator[None]:
        """Calls `look` in another thread, repeatedly, while the block takes long."""
        number = next(self._numbers)
        self._under_way[number] = look
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="dynaxla-collectives", daemon=True)
            self._thread.start()
        if not self._wake.is_set():
            self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._under_way.pop(number, None)

    def _run(self) -> None:
        seen: dict[int, int] = {}
        idle = 0
        while True:
            time.sleep(_SOON)
            now = dict(self._under_way)
            idle = 0 if now else idle + 1
            seen = {number: seen.get(number, 0) + 1 for number in now}
            for number, look in now.items():
                if seen[number] > 1 and (seen[number] & (seen[number] - 1) == 0 or seen[number] % _RARELY == 0):
                    with self._lock:
                        if number in self._under_way:
                            look()
            if idle > _RARELY:
                self._wake.clear()
                if not self._under_way:
                    self._wake.wait()


# A long-running program is looked at after 2, 4, 8, ... wake-ups and after each multiple of this number. After as many wake-ups without a
# program the thread sleeps.
_RARELY = 20

_watch = _Watch()
