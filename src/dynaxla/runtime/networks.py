"""Clients of XLA's over several processes, and which processes a program is for.

A program with collectives over some groups is for the smallest group of torch's that has all their ranks: its *members*. Their clients find
each other by that group's store, connect the cliques of all groups among them (XLA connects a clique when it first needs it, by a service
that is gone by then), and take leave of the service. From then on nothing but gloo's connections holds them together: whoever ends, ends.
A group that is made later needs clients of its own.
"""

from __future__ import annotations

import itertools
import json
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch

from .. import forks
from ..errors import CollectiveFailed
from ..observe import metrics
from . import private, private_processes, programs, transfer
from .clients import c_environment
from .connections import Ends, between, connections, cut
from .same_collectives import Agreement

# Seconds that processes, when all have come, need at most to connect.
_CONNECTING = 120


@dataclass(frozen=True, eq=False)
class Network:
    """A client over processes. Attributes: devices (one of each process, by its place); place (of this process); cliques (the sets of
    places that are connected); others (of those, by all processes, what no group of torch's is)."""

    devices: Sequence[jax.Device]
    place: int
    cliques: frozenset[tuple[int, ...]]
    others: frozenset[frozenset[int]]
    _connections: Mapping[int, Ends]

    def cut(self) -> None:
        """End the connections, so that no process waits for another one any more."""
        cut(self._connections)

    @property
    def device(self) -> jax.Device:
        """This process's."""
        return self.devices[self.place]


@dataclass(eq=False)
class Members:
    """The processes that a program with collectives is for.

    Attributes: ranks (torch's, of all members, by place); cliques (by a group's name: the places of its ranks, in its order); agreement (on
    the collectives of XLA's own, as they were traced last); calls (what XLA makes of these, in their order);
    holds (whether the program has to say that it wants them, also where no result of it depends on the last of them); others (sets of
    places that are to be connected besides, on all processes alike).
    """

    ranks: tuple[int, ...]
    cliques: Mapping[str, tuple[int, ...]]
    _group: Any
    agreement: Agreement = field(default_factory=Agreement)
    calls: list[str] = field(default_factory=list)
    holds: bool = False
    others: frozenset[frozenset[int]] = frozenset()

    @staticmethod
    def of(names: Sequence[str]) -> Members:
        """Those of a program whose collectives are over these groups. Raises: ValueError of torch for a group that is gone."""
        ranks = {name: _ranks(private.process_group(name)) for name in names}
        wanted = set().union(*ranks.values())
        candidates = [group for group in private_processes.named_groups().values() if wanted <= set(_ranks(group))]
        group = min(candidates, key=lambda group: len(_ranks(group)))  # the first of them, so on all processes the same
        members = _ranks(group)
        return Members(members, {name: tuple(map(members.index, of)) for name, of in ranks.items()}, group)

    def begin(self) -> None:
        """A program is traced anew."""
        self.agreement = Agreement()
        self.calls.clear()

    def cover(self, name: str, *, evenly: bool) -> tuple[tuple[int, ...], ...] | None:
        """All places, in groups: first that of this name; what the others do in a program of theirs is nothing to this one. evenly: in
        groups of one size; None if there are none."""
        clique = self.cliques[name]
        rest = [place for place in range(len(self.ranks)) if place not in clique]
        size = len(clique)
        if len(rest) % size and evenly:
            return None
        size = 1 if len(rest) % size else size
        return clique, *(tuple(rest[start : start + size]) for start in range(0, len(rest), size))

    def connected(self) -> Network:
        """The network for the program that was traced last, when its processes agree on the collectives. Made at the first call.

        Raises: CollectiveMismatch; CollectiveFailed.
        """
        self.agreement.settle()
        made = _networks.setdefault(self._group, [])
        for network in made:
            if network.cliques.issuperset(self.cliques.values()) and network.others >= self.others:
                return network
        network = _connect(self._group, self.ranks, len(made), self.others)
        made.append(network)
        metrics.add("networks")
        return network


def token(names: Sequence[str]) -> tuple[int, ...]:
    """What tells groups from later ones of the same names."""
    found = []
    for name in names:
        group = private.process_group(name)
        if group not in _numbers:
            _numbers[group] = next(_counter)
        found.append(_numbers[group])
    return tuple(found)


# By the group, which other groups may take the name of when it is gone.
_networks: weakref.WeakKeyDictionary[Any, list[Network]] = weakref.WeakKeyDictionary()
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_counter = itertools.count()
# Of all networks, what is never freed: XLA's cliques are known by it.
_kept: list[Any] = []


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(group))


def _connect(group: Any, ranks: tuple[int, ...], number: int, others: frozenset[frozenset[int]]) -> Network:
    """number: how many networks these processes have made before. others: see `Members`."""
    place, store, timeout = ranks.index(torch.distributed.get_rank()), private.store_of(group), private.timeout_of(group)
    if store is None:
        raise CollectiveFailed(
            f"the group of ranks {list(ranks)} has no store that its processes could meet at",
            hint="options={'collectives': 'torch'}, which needs none",
        )
    meeting = _Meeting(store, ranks, place, f"dynaxla/network/{number}", timeout)
    hosts = meeting.all("here", _host(store))
    host = hosts[place]["reached"] if len({item["machine"] for item in hosts}) > 1 else "127.0.0.1"
    service, before = None, connections()
    try:
        if place == 0:
            service, address = _service(host, len(ranks))
            meeting.say("address", address)
        address = meeting.hear("address", 0)
        threads = str(torch.get_num_threads())
        # As far as processes are on machines of one network, no proxy is between them.
        with c_environment("no_grpc_proxy", address.rpartition(":")[0]), c_environment("PJRT_NPROC", threads):
            agent = private_processes.make_agent(address, place, _CONNECTING)
            agent.connect()
            client = private_processes.make_client(agent, place, len(ranks), host)
        devices = sorted(client.devices(), key=lambda device: device.process_index)
        cliques = [*_cliques(ranks), *sorted(tuple(sorted(other)) for other in others if place in other)]
        cliques = list(dict.fromkeys(cliques))
        _meet(devices, place, cliques)
        made = {number: ends for number, ends in connections().items() if before.get(number) != ends}
        theirs = meeting.all("connected", list(made.values()))
        made = between(made, [(here, there) for ends in theirs for here, there in ends])
        agent.shutdown()
        if service is not None:
            service.shutdown()
    except jax.errors.JaxRuntimeError as error:
        raise CollectiveFailed(
            f"the processes of ranks {list(ranks)} could not connect XLA's collectives: {error}",
            hint="see whether they reach each other's hosts and ports, or take options={'collectives': 'torch'}",
        ) from error
    _kept.extend([client, agent])
    return Network(devices, place, frozenset(cliques), others, made)


def _cliques(ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The places of all groups among these ranks that this process is a part of, in the order in which the groups were made."""
    groups = map(_ranks, private_processes.named_groups().values())
    return list(dict.fromkeys(tuple(map(ranks.index, group)) for group in groups if set(group) <= set(ranks)))


def _meet(devices: Sequence[jax.Device], place: int, cliques: Sequence[tuple[int, ...]]) -> None:
    """Have XLA connect these cliques: by a program that has a collective over each, one after the other."""

    def program(x: jax.Array) -> jax.Array:
        for clique in cliques:
            rest = ((other,) for other in range(len(devices)) if other not in clique)
            x = private_processes.all_reduce(x, (clique, *rest), "max")
        return x

    lowered = private.lower(jax.jit(program, keep_unused=True).trace(jax.ShapeDtypeStruct((1,), np.float32)))
    run = programs.compile_lowered(lowered, devices[place], {}, among=devices)
    jax.block_until_ready(run.call([transfer.import_tensor(torch.zeros(16)[:1], devices[place])]))


def _service(host: str, count: int) -> tuple[Any, str]:
    """A service, and its address. Another process may take a port that was free a moment ago."""
    for trial in range(8):
        with socket.socket() as found:
            found.bind((host, 0))
            address = f"{host}:{found.getsockname()[1]}"
        try:
            return private_processes.make_service(address, count), address
        except jax.errors.JaxRuntimeError:
            if trial == 7:
                raise
    raise AssertionError


def _host(store: Any) -> dict[str, str]:
    """How others reach this process: by the address from which it reaches the store, if that tells its own."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    reached = socket.gethostname()
    if hasattr(store, "host"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as looking:  # which sends nothing
            try:
                looking.connect((store.host, store.port))
                reached = looking.getsockname()[0]
            except OSError:
                pass
    return {"machine": socket.gethostname(), "reached": reached}


class _Meeting:
    """What processes say to each other by a store, each thing once."""

    def __init__(self, store: Any, ranks: tuple[int, ...], place: int, prefix: str, seconds: float) -> None:
        self._store, self._ranks, self._place, self._prefix, self._seconds = store, ranks, place, prefix, seconds

    def say(self, what: str, value: Any) -> None:
        self._store.set(f"{self._prefix}/{what}/{self._place}", json.dumps(value))

    def hear(self, what: str, place: int) -> Any:
        return self._heard(what, [place])[0]

    def all(self, what: str, value: Any) -> list[Any]:
        """What all have said, by place; this one says this."""
        self.say(what, value)
        return self._heard(what, range(len(self._ranks)))

    def _heard(self, what: str, places: Sequence[int]) -> list[Any]:
        """Raises: CollectiveFailed, naming who has not come in time."""
        end, pause = time.monotonic() + self._seconds, 0.001
        missing = list(places)
        while True:
            missing = [place for place in missing if not self._store.check([self._key(what, place)])]
            if not missing:
                return [json.loads(self._store.get(self._key(what, place))) for place in places]
            if time.monotonic() > end:
                break
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
        raise CollectiveFailed(
            f"ranks {[self._ranks[place] for place in missing]} did not come within {self._seconds:g} s, the group's timeout, to connect "
            f"XLA's collectives of ranks {list(self._ranks)}",
            hint="all of these run compiled programs with options={'collectives': 'xla'}; if only some are to, make a group of these "
            "(torch.distributed.new_group) before, or take options={'collectives': 'torch'}",
        )

    def _key(self, what: str, place: int) -> str:
        return f"{self._prefix}/{what}/{place}"


def _had_networks() -> bool:
    """In a child: whether the parent had networks, which are not freed there."""
    for thing in _kept:
        forks.leave(thing)
    return bool(_kept)


forks.uses_xla(_had_networks)
