"""Compares the collectives of programs among processes before a program's first run. Without this check, processes with different
collectives would deadlock, or combine unrelated tensors.

The processes do not compare whole programs but the sequence of collectives over each process group. One process may have in two programs
(because it reads a value in between) the sequence that another process has in one program. For each group, a process counts the collectives
that its programs have called.

In a program's first run, the process *posts* the program's next collectives: it writes them to the group's store, under its count. Then it
waits until every other process of the group has posted the same collectives, and asks those that have not posted to do so (a *request*). A
process whose program has run before posts and compares nothing by itself. But if its collective takes longer than about `_POLL_SECONDS`, a
thread of this process reads requests from the store and answers them.

A collective of a training step that runs in eager mode counts as a program with one collective (`call_eagerly`). On a GPU, where the host
does not wait for the collective, every such collective is posted, even if no process has requested it.

If XLA itself executes the collectives of a program, they are compared before the program is compiled.

Collectives are not compared if, on every process, the program that contains them has run before. Collectives outside of programs and steps
are never compared.
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

# While collectives run, a thread wakes at this interval, in seconds, to read requests of other processes (see `_LONGEST_INTERVAL`).
_POLL_SECONDS = 0.1
# A process whose collective has failed waits this many seconds for the posts of other processes.
_FAILURE_WAIT_SECONDS = 1.0
# A process keeps this many of its latest collectives over a group, which it can still post. A process can run ahead of others by
# collectives in which it need not wait, for example as the source of a broadcast.
_MAX_RECENT = 256
# The maximum number of collectives that an exception lists if it is unknown which of several has failed.
_MAX_NAMED = 3


@dataclass(frozen=True)
class Collective:
    """A collective of a program.

    Attributes:
        group: The name of its process group.
        kind: The kind of op.
        settings: Further arguments that must be equal on all processes.
        tensors: The dtypes and shapes of its tensors, such as "f32[4, 8]".
        splits: For all_to_all, the numbers of rows sent to each process, and those received from each; else ().
        where: The line of user code; "" if it is unknown.
        caller: "" if torch runs the collective, else a text for messages, such as "by XLA among ranks [0, 1]".
    """

    group: str
    kind: str
    settings: tuple[str, ...]
    tensors: tuple[str, ...]
    splits: tuple[tuple[int, ...], ...] = ()
    where: str = ""
    caller: str = ""

    def matches(self, other: Collective, own_rank: int, other_rank: int) -> bool:
        """True if two processes can run these two calls as one collective.

        Args:
            other: The call of another process.
            own_rank: The rank, within the group, of the process that calls `self`.
            other_rank: The rank, within the group, of the process that calls `other`.
        """
        if (self.kind, self.settings, self.caller) != (other.kind, other.settings, other.caller):
            return False
        if not self.splits or not other.splits:
            return self.tensors == other.tensors and self.splits == other.splits
        (own_sent, own_received), (other_sent, other_received) = self.splits, other.splits
        are_rows_equal = [_row_type(text) for text in self.tensors] == [_row_type(text) for text in other.tensors]
        return are_rows_equal and own_sent[other_rank] == other_received[own_rank] and own_received[other_rank] == other_sent[own_rank]

    def __str__(self) -> str:
        splits = [f"sends {list(self.splits[0])}, gets {list(self.splits[1])}"] if self.splits else []
        called = f"{self.kind}({', '.join([*self.tensors, *self.settings, *splits])})"
        return " ".join([called, *([self.caller] if self.caller else []), *([f"at {self.where}"] if self.where else [])])


def _row_type(text: str) -> str:
    """Returns the description of a tensor (see `Collective.tensors`) without its first dimension: "f32[ 8]" for "f32[4, 8]"."""
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
            start: Called with the process group; starts the collective and returns its Work.
            waits_on_host: True if the host waits for the result, as on the CPU. During the wait, requests of other processes are answered.

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
            # Another thread answers requests. This thread cannot do so between short waits, because gloo's reduce_scatter takes no
            # timeout.
            with contextlib.ExitStack() as stack:
                if waits_on_host and channel.others:
                    stack.enter_context(_poller.during(functools.partial(_answer, channel, self._from(index + 1, collective.group))))
                work.wait()
        except RuntimeError as error:
            raise channel.failure([collective], error, self._from(index + 1, collective.group)) from error
        except BaseException:  # Ctrl-C
            with contextlib.suppress(RuntimeError):
                work.wait()  # the collective must not write to the program's memory after `run` has returned
            raise

    # For programs whose collectives XLA itself executes

    def agree_now(self) -> None:
        """Compares all collectives of the program, unless that was done before. Raises: CollectiveMismatch; CollectiveFailed."""
        for name in self._groups() if not self._is_agreed else ():
            group = private.process_group(name)
            _channel_of(group).agree(self._from(0, name), True, private.timeout_of(group))
        self._is_agreed = True

    @contextlib.contextmanager
    def running(self, shut_down: Callable[[], None]) -> Iterator[None]:
        """A context for a run of the program, in which XLA executes the collectives. Requests of other processes are answered meanwhile.

        Args:
            shut_down: Makes the running collectives fail on all processes. Called after a mismatch, a timeout or a failure.

        Raises: CollectiveMismatch or CollectiveFailed if a collective fails.
        """
        groups = {name: private.process_group(name) for name in self._groups()}
        channels = {name: _channel_of(group) for name, group in groups.items()}
        for collective in self.collectives:
            channels[collective.group].begin(collective)
        clock = _IdleClock()
        timeout = ""  # the message if the run has timed out

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
        """Returns the exception for a failed run: a CollectiveMismatch if the collectives of any group differ, else a CollectiveFailed."""
        errors = [channel.failure(self._from(0, name), error) for name, channel in channels.items()]
        return next((item for item in errors if isinstance(item, CollectiveMismatch)), errors[0])

    def _groups(self) -> list[str]:
        """Returns the names of the process groups of the collectives."""
        return list(dict.fromkeys(item.group for item in self.collectives))

    def _from(self, index: int, group: str) -> list[Collective]:
        """Returns the program's collectives over a group, beginning with the collective at an index."""
        return [item for item in self.collectives[index:] if item.group == group]


def call_eagerly(collective: Collective, start: Callable[[Any], Any], waits_on_host: bool) -> None:
    """Calls a collective in eager mode, and waits for it. Another process may have the same collective in a program.

    Args:
        collective: The collective.
        start, waits_on_host: See `ProgramCollectives.run`.

    Raises: CollectiveMismatch; CollectiveFailed; exceptions of `start`.
    """
    channel = _channel_of(private.process_group(collective.group))
    if not waits_on_host:
        channel.post_next(collective)
    key = dataclasses.replace(collective, where="")
    collectives = channel.eager.get(key)
    if collectives is None:
        collectives = ProgramCollectives()
        collectives.add(collective)
        channel.eager.put(key, collectives)
    collectives.run(0, start, waits_on_host)


def _answer(channel: _Channel, upcoming: Sequence[Collective]) -> None:
    """Answers requests; see `_Channel.answer`."""
    with contextlib.suppress(RuntimeError):  # the store may be gone before the group is
        channel.answer(upcoming)


class _Channel:
    """The collectives and posts of one process group, as this process sees them. A *group rank* is a process's rank within the group.

    Attributes:
        others: The group ranks of the other processes; empty if the group has no store.
        eager: The latest collectives that were called in eager mode, each as a program with one collective.
    """

    def __init__(self, group: Any) -> None:
        """Must not keep a reference to the group, since `_channels` refers weakly to the group and strongly to this object."""
        self._ranks = torch.distributed.get_process_group_ranks(group)  # global ranks
        self._group_rank = int(group.rank())
        self._store = private.store_of(group)
        self.others = (
            [group_rank for group_rank in range(len(self._ranks)) if group_rank != self._group_rank] if self._store is not None else []
        )
        self._count = 0  # the number of collectives that this process has called over the group
        self._recent: deque[Collective] = deque(maxlen=_MAX_RECENT)  # the latest of these collectives
        self._round = 0  # the number of mismatches so far; see `_start_next_round`
        # By group rank, the latest post of a process: the count of the post's first collective, and the posted collectives.
        self._posts: dict[int, tuple[int, list[Collective]]] = {}
        self._posted_counts: set[int] = set()  # the counts under which this process has posted
        self._requests_answered = 0  # this process has answered all of the first so many requests of all processes
        self._difference: CollectiveMismatch | None = None
        self.eager: LeastRecentlyUsed[ProgramCollectives] = LeastRecentlyUsed(_MAX_RECENT)

    @property
    def differs(self) -> bool:
        """True if another process has posted different collectives."""
        return self._difference is not None

    def begin(self, collective: Collective) -> None:
        """Counts a collective that this process is about to call."""
        self._count += 1
        self._recent.append(collective)

    def post_next(self, collective: Collective) -> None:
        """Posts the next collective without a request. For collectives on a GPU, during which no thread of this process answers any."""
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
            is_first: True if `upcoming` begins with its program's first collective over this group.
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
        """Waits until these processes have posted their next collectives, and compares them. Raises: see `agree`."""
        end, pause = time.monotonic() + seconds, 0.001
        while True:
            missing = [group_rank for group_rank in missing if not self._read_post(group_rank, self._count, upcoming)]
            if not missing:
                return
            if time.monotonic() > end:
                break
            self.answer(upcoming)  # another process may request earlier collectives of this process
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
        """Answers requests of other processes: posts the requested collectives of this process, and compares them.

        A mismatch is kept in `_difference`, and not raised.

        Args:
            upcoming: The next collectives of this process, as far as they are known.

        Raises: RuntimeError of the store.
        """
        requests = self._store.add("dynaxla/asked", 0)
        if requests == self._requests_answered:
            return
        all_answered = True
        for group_rank in self.others:
            request = self._read(f"asking/{group_rank}")
            if request is None or request[0] != self._round:
                continue
            _, start = request
            collectives = self._collectives_from(start, upcoming)
            if not collectives:
                all_answered &= start < self._count
                continue
            if start not in self._posted_counts:
                self._post(start, collectives)
            try:
                self._read_post(group_rank, start, collectives)
            except CollectiveMismatch as error:
                self._difference = error
        if all_answered:
            self._requests_answered = requests

    def failure(self, started: Sequence[Collective], error: Exception, upcoming: Sequence[Collective] = ()) -> Exception:
        """Returns the exception for a failed collective, after a wait of `_FAILURE_WAIT_SECONDS` for posts that show a mismatch.

        Args:
            started: The latest collectives of this process, one of which has failed.
            error: The error of the failed collective.
            upcoming: The next collectives of this process.
        """
        start, collectives = self._count - len(started), [*started, *upcoming]
        missing = list(self.others)
        with contextlib.suppress(RuntimeError):
            try:
                self._post(start, collectives)
                end = time.monotonic() + _FAILURE_WAIT_SECONDS
                while missing and self._difference is None and time.monotonic() < end:
                    missing = [group_rank for group_rank in missing if not self._read_post(group_rank, start, collectives)]
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
        """True if the latest post of a process covers the next collective of this process."""
        start, posted = self._posts.get(group_rank, (0, ()))
        return start <= self._count < start + len(posted)

    def _collectives_from(self, start: int, upcoming: Sequence[Collective]) -> list[Collective]:
        """Returns this process's collectives from the count `start` on; [] if the first of them is too long ago, or not known yet."""
        first = self._count - len(self._recent)
        return [*self._recent, *upcoming][start - first :] if start >= first else []

    def _post(self, start: int, collectives: Sequence[Collective]) -> None:
        """Posts collectives of this process. `start` is the count of the first one."""
        self._posted_counts.add(start)
        self._store.set(f"dynaxla/{self._round}/{start}/{self._group_rank}", json.dumps([astuple(item) for item in collectives]))

    def _request_posts(self) -> None:
        """Asks all other processes to post their collectives from this process's count on."""
        self._store.set(f"dynaxla/asking/{self._group_rank}", json.dumps([self._round, self._count]))
        self._store.add("dynaxla/asked", 1)

    def _read(self, key: str) -> Any:
        """Returns a value from the store; None if there is none."""
        key = f"dynaxla/{key}"
        return json.loads(self._store.get(key)) if self._store.check([key]) else None

    def _read_post(self, group_rank: int, start: int, collectives: Sequence[Collective]) -> bool:
        """True if a process has posted its collectives from the count `start` on.

        Raises: CollectiveMismatch if they differ from `collectives`, which are those of this process.
        """
        posted = self._read(f"{self._round}/{start}/{group_rank}")
        if posted is None:
            return False
        self._posts[group_rank] = start, [_collective(item) for item in posted]
        self._compare(group_rank, start, collectives)
        return True

    def _compare(self, group_rank: int, start: int, collectives: Sequence[Collective]) -> None:
        """Compares collectives of this process, from the count `start` on, with another's latest post. Raises: CollectiveMismatch."""
        posted_from, posted = self._posts[group_rank]
        for own, other in zip(collectives, posted[start - posted_from :], strict=False):
            if not own.matches(other, self._group_rank, group_rank):
                raise self._mismatch(group_rank, own, other)

    def _mismatch(self, group_rank: int, own: Collective, other: Collective) -> CollectiveMismatch:
        """Returns the exception for a collective of this process that differs from another process's, with both in the order of ranks."""
        (first_rank, first), (second_rank, second) = sorted(
            [(self._ranks[self._group_rank], own), (self._ranks[group_rank], other)], key=lambda item: item[0]
        )
        return CollectiveMismatch(
            f"ranks {first_rank} and {second_rank} of the group of ranks {self._ranks} call different collectives\n"
            f"  rank {first_rank}: {first}\n  rank {second_rank}: {second}",
            where=own.where,
            hint="give all ranks inputs of the same sizes and dtypes (drop or pad the last batch), and let none skip a collective (an `if` "
            "on the rank, a module that only some use)",
        )

    def _start_next_round(self) -> None:
        """Discards all posts after a mismatch, as all processes do. Later posts have new keys, with the number of the new round."""
        self._round += 1
        self._posts.clear()
        self._posted_counts.clear()
        self._difference = None

    def _names(self, group_ranks: Sequence[int]) -> str:
        """Describes processes by their global ranks, for messages."""
        ranks = [self._ranks[group_rank] for group_rank in group_ranks]
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _collective(item: Sequence[Any]) -> Collective:
    """Returns a collective from its JSON form in the store."""
    group, kind, settings, tensors, splits, where, caller = item
    return Collective(group, kind, tuple(settings), tuple(tensors), tuple(map(tuple, splits)), where, caller)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


# Keyed by the group object, because a later group may have the same name.
_channels: weakref.WeakKeyDictionary[Any, _Channel] = weakref.WeakKeyDictionary()


def _channel_of(group: Any) -> _Channel:
    return _channels.get(group) or _channels.setdefault(group, _Channel(group))  # `setdefault`: threads must get the same channel


class _IdleClock:
    """Measures for how long this process has used hardly any CPU time. (A process that computes does not wait for a collective.)"""

    def __init__(self) -> None:
        self._idle_since = self._last_call = time.monotonic()
        self._last_cpu = time.process_time()

    def seconds(self) -> float:
        """Returns the seconds since the process was last busy. Each call looks at the CPU time since the previous call."""
        now, cpu = time.monotonic(), time.process_time()
        if cpu - self._last_cpu > _BUSY_FRACTION * (now - self._last_call):
            self._idle_since = now
        self._last_call, self._last_cpu = now, cpu
        return now - self._idle_since


# The fraction of one processor's time above which a process counts as busy.
_BUSY_FRACTION = 0.05


class _Poller:
    """A thread that calls functions at intervals while programs run for long. It sleeps while no program runs."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._running: dict[int, Callable[[], None]] = {}
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        # Held while the thread calls a function, so that the function's context `during` does not end meanwhile.
        self._lock = forks.lock()

    @contextlib.contextmanager
    def during(self, poll: Callable[[], None]) -> Iterator[None]:
        """A context during which the thread calls `poll` repeatedly, if the context lasts longer than about `_POLL_SECONDS`."""
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
        wake_ups: dict[int, int] = {}  # the number of wake-ups during each active context, by the context's number
        idle = 0  # the number of wake-ups in a row without an active context
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


# The thread wakes every `_POLL_SECONDS`. In a context that lasts long, `poll` is called at wake-ups 2, 4, 8, ... and at each multiple of
# this number. After more wake-ups than this without an active context, the thread sleeps until the next context begins.
_LONGEST_INTERVAL = 20

_poller = _Poller()
