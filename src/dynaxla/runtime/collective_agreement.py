"""Compares the collectives of programs among processes before a program's first run. Without this check, processes with different
collectives would deadlock, or combine unrelated tensors.

The processes compare the sequence of collectives over each process group, not whole programs: one process may have them in two programs
(because it read a value in between), another in one. Each process counts the collectives that its programs have called over a group. In a
program's first run it posts the program's next collectives to the group's store, under that count, and waits until every other process of
the group has posted the same ones. A process whose program has run before posts and compares nothing. But if its collective does not return
within `_POLL_SECONDS`, a thread reads the store and answers processes that ask. A collective of a step in eager mode counts as a program
with one collective (`call_eagerly`). On a GPU, where the host does not wait for it, it is posted without a request.

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

# While a collective runs, its process reads requests of other processes at this interval.
_POLL_SECONDS = 0.1
# A process whose collective has failed waits this long for posts of the others.
_FAILURE_WAIT_SECONDS = 1.0
# The number of recent collectives of a group that a process can still report. A process can run ahead of others by collectives in which it
# need not wait, for example as the source of a broadcast.
_MAX_RECENT = 256
# The most collectives that an exception names if one of several has failed.
_MAX_NAMED = 3


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
        caller: "" if torch runs the collective, otherwise a text for messages, such as "by XLA among ranks [0, 1]".
    """

    group: str
    kind: str
    settings: tuple[str, ...]
    tensors: tuple[str, ...]
    splits: tuple[tuple[int, ...], ...] = ()
    where: str = ""
    caller: str = ""

    def fits(self, other: Collective, me: int, them: int) -> bool:
        """True if this collective of the group's process `me` and `other` of its process `them` match."""
        if (self.kind, self.settings, self.caller) != (other.kind, other.settings, other.caller):
            return False
        if not self.splits or not other.splits:
            return self.tensors == other.tensors and self.splits == other.splits
        (sent, received), (their_sent, their_received) = self.splits, other.splits
        same_rows = [_rows(text) for text in self.tensors] == [_rows(text) for text in other.tensors]
        return same_rows and sent[them] == their_received[me] and received[them] == their_sent[me]

    def __str__(self) -> str:
        splits = [f"sends {list(self.splits[0])}, gets {list(self.splits[1])}"] if self.splits else []
        called = f"{self.kind}({', '.join([*self.tensors, *self.settings, *splits])})"
        return " ".join([called, *([self.caller] if self.caller else []), *([f"at {self.where}"] if self.where else [])])


def _rows(text: str) -> str:
    """Returns the description of a tensor without its first dimension."""
    head, _, sizes = text.partition("[")
    return f"{head}[{sizes.partition(',')[2]}"


class ProgramCollectives:
    """The collectives of a program, in order. The processes of each group compare them in the program's first run."""

    def __init__(self) -> None:
        self.collectives: list[Collective] = []
        self._is_agreed = False

    def add(self, collective: Collective) -> int:
        """Appends a collective while the program is traced. Returns: its index."""
        self.collectives.append(collective)
        return len(self.collectives) - 1

    def run(self, index: int, start: Callable[[Any], Any], waits_on_host: bool) -> None:
        """Calls a collective, and waits for it.

        Args:
            index: The collective's index.
            start: Starts the collective on the process group; returns its Work.
            waits_on_host: True if the host waits until the result is there, as on the CPU. Other processes are answered meanwhile.

        Raises: CollectiveMismatch; CollectiveFailed; exceptions of `start`.
        """
        collective = self.collectives[index]
        group = private.process_group(collective.group)
        channel = _channel_of(group)
        if not self._is_agreed:
            is_first = all(item.group != collective.group for item in self.collectives[:index])
            channel.agree(self._from(index, collective.group), is_first, private.timeout_of(group))
            self._is_agreed = index == len(self.collectives) - 1
        channel.begin(collective)
        work = start(group)
        try:
            # Another thread answers, because this one cannot wait in intervals: gloo's reduce_scatter takes no timeout.
            with contextlib.ExitStack() as stack:
                if waits_on_host and channel.others:
                    stack.enter_context(_poller.during(functools.partial(_answer, channel, self._from(index + 1, collective.group))))
                work.wait()
        except RuntimeError as error:
            raise channel.failure([collective], error, self._from(index + 1, collective.group)) from error
        except BaseException:  # Ctrl-C
            with contextlib.suppress(RuntimeError):
                work.wait()  # until the collective no longer writes to the program's memory
            raise

    # For programs whose collectives XLA itself executes

    def agree_now(self) -> None:
        """Compares all collectives of the program, unless they have been compared. Raises: CollectiveMismatch; CollectiveFailed."""
        for name in self._groups() if not self._is_agreed else ():
            group = private.process_group(name)
            _channel_of(group).agree(self._from(0, name), True, private.timeout_of(group))
        self._is_agreed = True

    @contextlib.contextmanager
    def running(self, shut_down: Callable[[], None]) -> Iterator[None]:
        """Surrounds a run of the program, in which XLA calls all of its collectives.

        Args:
            shut_down: Makes the running collectives fail, on all processes.

        Raises: CollectiveMismatch or CollectiveFailed if a collective fails.
        """
        groups = {name: private.process_group(name) for name in self._groups()}
        channels = {name: _channel_of(group) for name, group in groups.items()}
        for collective in self.collectives:
            channels[collective.group].begin(collective)
        clock = _IdleClock()
        timeout = ""  # the message of a timeout

        def poll() -> None:
            nonlocal timeout
            for channel in channels.values():
                if channel.others:
                    _answer(channel, [])
            seconds = max(map(private.timeout_of, groups.values()))
            if clock.seconds() > seconds:
                timeout = f"it has not ended within {seconds:g} s, the group's timeout"
            if timeout or any(channel.differs for channel in channels.values()):
                shut_down()

        try:
            with _poller.during(poll):
                yield
        except RuntimeError as error:
            if "Gloo" not in str(error):
                raise
            shut_down()
            raise self._failure(channels, RuntimeError(timeout) if timeout else error) from error

    def _failure(self, channels: dict[str, _Channel], error: Exception) -> Exception:
        """Returns the exception for a failed run: a CollectiveMismatch if any group has one."""
        errors = [channel.failure(self._from(0, name), error) for name, channel in channels.items()]
        return next((item for item in errors if isinstance(item, CollectiveMismatch)), errors[0])

    def _groups(self) -> list[str]:
        return list(dict.fromkeys(item.group for item in self.collectives))

    def _from(self, index: int, group: str) -> list[Collective]:
        """Returns the program's collectives over a group, from an index on."""
        return [item for item in self.collectives[index:] if item.group == group]


def call_eagerly(collective: Collective, start: Callable[[Any], Any], waits_on_host: bool) -> None:
    """Calls a collective in eager mode, and waits for it. Another process may have the same collective in a program.

    For `start` and `waits_on_host` see `ProgramCollectives.run`. Raises: CollectiveMismatch; CollectiveFailed; exceptions of `start`.
    """
    channel = _channel_of(private.process_group(collective.group))
    if not waits_on_host:
        channel.post_next(collective)
    key = dataclasses.replace(collective, where="")
    agreement = channel.eager.get(key)
    if agreement is None:
        agreement = ProgramCollectives()
        agreement.add(collective)
        channel.eager.put(key, agreement)
    agreement.run(0, start, waits_on_host)


def _answer(channel: _Channel, upcoming: Sequence[Collective]) -> None:
    with contextlib.suppress(RuntimeError):  # the store may be gone before the group is
        channel.answer(upcoming)


class _Channel:
    """The state of this process in a process group. A *group rank* is a process's rank within the group.

    Attributes:
        others: The group ranks of the other processes; empty if the group has no store.
        eager: The collectives that were called in eager mode, each as a program with one collective.
    """

    def __init__(self, group: Any) -> None:
        """Creates the state. It must not keep a reference to the group, which is its key in a WeakKeyDictionary."""
        self._ranks = torch.distributed.get_process_group_ranks(group)  # global ranks
        self._group_rank = int(group.rank())
        self._store = private.store_of(group)
        self.others = (
            [group_rank for group_rank in range(len(self._ranks)) if group_rank != self._group_rank] if self._store is not None else []
        )
        self._count = 0
        self._recent: deque[Collective] = deque(maxlen=_MAX_RECENT)
        self._round = 0
        # By group rank, the latest post of a process: the count of its first collective, and its collectives.
        self._posts: dict[int, tuple[int, list[Collective]]] = {}
        self._posted_counts: set[int] = set()
        self._requests_seen = 0
        self._difference: CollectiveMismatch | None = None
        self.eager: LeastRecentlyUsed[ProgramCollectives] = LeastRecentlyUsed(_MAX_RECENT)

    @property
    def differs(self) -> bool:
        """True if another process has posted different collectives."""
        return self._difference is not None

    def begin(self, collective: Collective) -> None:
        """Records that a collective starts."""
        self._count += 1
        self._recent.append(collective)

    def post_next(self, collective: Collective) -> None:
        """Posts the next collective without a request. On a GPU the host does not wait for it, and so could not answer later."""
        if not self.others:
            return
        with contextlib.suppress(RuntimeError):  # the store may be gone before the group is
            self._post(self._count, [collective])
            self._store.delete_key(f"dynaxla/{self._round}/{self._count - _MAX_RECENT}/{self._group_rank}")
        self._posted_counts.discard(self._count - _MAX_RECENT)

    def agree(self, upcoming: Sequence[Collective], is_first: bool, seconds: float) -> None:
        """Waits until all other processes have posted the same next collectives.

        Args:
            upcoming: The next collectives of this process.
            is_first: True if the first of them is the first of its program over this group.
            seconds: The timeout.

        Raises: CollectiveMismatch; CollectiveFailed if a process does not post in time.
        """
        missing = [group_rank for group_rank in self.others if not self._has_posted_next(group_rank)]
        if not self.others or not (is_first or missing):
            return
        try:
            self._post(self._count, upcoming)
            for group_rank in self.others:
                if group_rank not in missing:
                    self._compare(group_rank, self._count, upcoming)
            if missing:
                self._request_posts()
                self._wait_for_posts(missing, upcoming, seconds)
            metrics.add("agreements")
        except CollectiveMismatch:
            self._start_next_round()
            raise
        except RuntimeError as error:
            if isinstance(error, CollectiveFailed):
                raise
            raise CollectiveFailed(
                f"the store of the group of ranks {self._ranks} cannot be reached: {error}",
                op=str(upcoming[0]),
                hint="the process that runs the store, usually rank 0, has probably ended: read its log, and restart all processes",
            ) from error

    def _wait_for_posts(self, missing: list[int], upcoming: Sequence[Collective], seconds: float) -> None:
        end, pause = time.monotonic() + seconds, 0.001
        while True:
            missing = [group_rank for group_rank in missing if not self._read_post(group_rank, self._count, upcoming)]
            if not missing:
                return
            if time.monotonic() > end:
                break
            self.answer(upcoming)  # others may ask about earlier collectives of this process
            if self._difference is not None:
                raise self._difference
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
        raise CollectiveFailed(
            f"{self._names(missing)} of the group of ranks {self._ranks} did not reach a collective within {seconds:g} s, the group's "
            f"timeout: rank {self._ranks[self._group_rank]} waits to compare it before the first run of its program",
            op=str(upcoming[0]),
            hint="check that this process is alive, and that it calls the same compiled step or model",
        )

    def answer(self, upcoming: Sequence[Collective]) -> None:
        """Posts the past and the next collectives of this process for processes that ask for them.

        Raises: RuntimeError of the store.
        """
        requests = self._store.add("dynaxla/asked", 0)
        if requests == self._requests_seen:
            return
        all_answered = True
        for group_rank in self.others:
            asked = self._read(f"asking/{group_rank}")
            if asked is None or asked[0] != self._round:
                continue
            collectives = self._known_from(asked[1], upcoming)
            if not collectives:
                all_answered &= asked[1] < self._count
                continue
            if asked[1] not in self._posted_counts:
                self._post(asked[1], collectives)
            try:
                self._read_post(group_rank, asked[1], collectives)
            except CollectiveMismatch as error:
                self._difference = error
        if all_answered:
            self._requests_seen = requests

    def failure(self, started: Sequence[Collective], error: Exception, upcoming: Sequence[Collective] = ()) -> Exception:
        """Returns the exception for a failed collective, after the other processes have had time to post theirs.

        Args:
            started: The latest collectives, one of which has failed.
            error: The original error.
            upcoming: The collectives that come next.
        """
        start, collectives = self._count - len(started), [*started, *upcoming]
        missing = list(self.others)
        with contextlib.suppress(RuntimeError):
            try:
                self._post(start, collectives)
                end = time.monotonic() + _FAILURE_WAIT_SECONDS
                while missing and self._difference is None and time.monotonic() < end:
                    missing = [other for other in missing if not self._read_post(other, start, collectives)]
                    time.sleep(0.02)
            except CollectiveMismatch as difference:
                self._difference = difference
        if self._difference is not None:
            return self._difference
        silent = f"; no answer came from {self._names(missing)}" if missing and len(missing) < len(self.others) else ""
        return CollectiveFailed(
            f"a collective of ranks {self._ranks} failed on rank {self._ranks[self._group_rank]}: {_first_line(error)}{silent}",
            op=" or ".join(map(str, started[:_MAX_NAMED])) + (" or a later one" if len(started) > _MAX_NAMED else ""),
            hint="another process has ended, hangs, or calls something else: read its log; the program has written nothing, so save a "
            "checkpoint if you need one, and restart all processes, since the group cannot be used any more",
        )

    # Posts

    def _has_posted_next(self, group_rank: int) -> bool:
        start, posted = self._posts.get(group_rank, (0, ()))
        return start <= self._count < start + len(posted)

    def _known_from(self, start: int, upcoming: Sequence[Collective]) -> list[Collective]:
        """Returns the known collectives of this process from a count on."""
        first = self._count - len(self._recent)
        return [*self._recent, *upcoming][start - first :] if start >= first else []

    def _post(self, start: int, collectives: Sequence[Collective]) -> None:
        self._posted_counts.add(start)
        self._store.set(f"dynaxla/{self._round}/{start}/{self._group_rank}", json.dumps([astuple(item) for item in collectives]))

    def _request_posts(self) -> None:
        self._store.set(f"dynaxla/asking/{self._group_rank}", json.dumps([self._round, self._count]))
        self._store.add("dynaxla/asked", 1)

    def _read(self, key: str) -> Any:
        key = f"dynaxla/{key}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _read_post(self, group_rank: int, start: int, collectives: Sequence[Collective]) -> bool:
        """True if a process has posted its collectives from a count on. Raises: CollectiveMismatch if they differ from `collectives`."""
        found = self._read(f"{self._round}/{start}/{group_rank}")
        if found is None:
            return False
        self._posts[group_rank] = start, [_collective(item) for item in found]
        self._compare(group_rank, start, collectives)
        return True

    def _compare(self, group_rank: int, start: int, collectives: Sequence[Collective]) -> None:
        posted_from, posted = self._posts[group_rank]
        for mine, theirs in zip(collectives, posted[start - posted_from :], strict=False):
            if not mine.fits(theirs, self._group_rank, group_rank):
                raise self._mismatch(group_rank, mine, theirs)

    def _mismatch(self, group_rank: int, mine: Collective, theirs: Collective) -> CollectiveMismatch:
        (me, my), (them, their) = sorted(
            [(self._ranks[self._group_rank], mine), (self._ranks[group_rank], theirs)], key=lambda item: item[0]
        )
        return CollectiveMismatch(
            f"ranks {me} and {them} of the group of ranks {self._ranks} call different collectives\n"
            f"  rank {me}: {my}\n  rank {them}: {their}",
            where=mine.where,
            hint="give all ranks inputs of the same sizes and dtypes (drop or pad the last batch), and let none skip a collective (an `if` "
            "on the rank, a module that only some use)",
        )

    def _start_next_round(self) -> None:
        """Discards all posts after a mismatch, and begins a round of posts under new keys. All processes do so."""
        self._round += 1
        self._posts.clear()
        self._posted_counts.clear()
        self._difference = None

    def _names(self, group_ranks: Sequence[int]) -> str:
        ranks = [self._ranks[group_rank] for group_rank in group_ranks]
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
        if cpu - self._cpu > _BUSY_FRACTION * (now - self._before):
            self._since = now
        self._before, self._cpu = now, cpu
        return now - self._since


# The fraction of one processor above which a process counts as computing.
_BUSY_FRACTION = 0.05


class _Poller:
    """A thread that wakes every `_POLL_SECONDS` and calls functions while programs run for long. It sleeps while no program runs."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._running: dict[int, Callable[[], None]] = {}
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        # Held during a call, so that the block in `during` does not end meanwhile.
        self._lock = forks.lock()

    @contextlib.contextmanager
    def during(self, poll: Callable[[], None]) -> Iterator[None]:
        """Calls `poll` in the thread, repeatedly, if the block takes long."""
        number = next(self._numbers)
        self._running[number] = poll
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="dynaxla-collectives", daemon=True)
            self._thread.start()
        if not self._wake.is_set():
            self._wake.set()
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(number, None)

    def _run(self) -> None:
        wake_ups: dict[int, int] = {}  # by number of the running block
        idle = 0
        while True:
            time.sleep(_POLL_SECONDS)
            now = dict(self._running)
            idle = 0 if now else idle + 1
            wake_ups = {number: wake_ups.get(number, 0) + 1 for number in now}
            for number, poll in now.items():
                count = wake_ups[number]
                if count > 1 and (count & (count - 1) == 0 or count % _LONGEST_INTERVAL == 0):
                    with self._lock:
                        if number in self._running:
                            poll()
            if idle > _LONGEST_INTERVAL:
                self._wake.clear()
                if not self._running:
                    self._wake.wait()


# The functions of a long-running program are called after 2, 4, 8, ... wake-ups and after each multiple of this number. After as many
# wake-ups without a program the thread sleeps.
_LONGEST_INTERVAL = 20

_poller = _Poller()
