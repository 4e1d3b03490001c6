"""XLA clients that span several processes, and the set of processes that take part in a program.

The *members* of a program with collectives over some process groups are the ranks of the smallest process group that contains all of them.
The members' clients find each other through that group's store, connect the cliques of all process groups among the members, and then leave
jaxlib's coordination service. The cliques must be connected early: XLA would connect a clique at its first use, by the service, which no
longer exists then. Afterwards only gloo's connections remain, so a process that ends does not end the others. A process group that is
created later needs new clients.
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
from .collective_agreement import ProgramCollectives
from .tcp_connections import Ends, between, connections, cut

# Timeout for connecting, in seconds, once all processes have arrived.
_CONNECTING = 120


@dataclass(frozen=True, eq=False)
class Network:
    """An XLA client that spans several processes. The *place* of a process is its index among the members.

    Attributes:
        devices: One device of each process, by place.
        place: This process's place.
        cliques: The connected tuples of places, among them this process's.
        others: The connected sets of places, on all processes, that are not process groups of torch.
    """

    devices: Sequence[jax.Device]
    place: int
    cliques: frozenset[tuple[int, ...]]
    others: frozenset[frozenset[int]]
    _connections: Mapping[int, Ends]

    def cut(self) -> None:
        """Closes the connections, so that no process waits for another any more."""
        cut(self._connections)

    @property
    def device(self) -> jax.Device:
        """This process's device."""
        return self.devices[self.place]


@dataclass(eq=False)
class Members:
    """The processes that take part in a program with collectives.

    Attributes:
        ranks: torch's ranks of all members, by place.
        cliques: For each process group's name, the places of its ranks, in the group's order.
        agreement: The processes' agreement on the collectives of the latest trace.
        calls: The HLO collectives that the latest trace has emitted, in order.
        holds: Whether the program must keep its collectives alive even if no result depends on the last of them.
        others: Further sets of places to connect, equal on all processes.
    """

    ranks: tuple[int, ...]
    cliques: Mapping[str, tuple[int, ...]]
    _group: Any
    agreement: ProgramCollectives = field(default_factory=ProgramCollectives)
    calls: list[str] = field(default_factory=list)
    holds: bool = False
    others: frozenset[frozenset[int]] = frozenset()

    @staticmethod
    def of(names: Sequence[str]) -> Members:
        """Returns the members of a program with collectives over these process groups.

        Raises: ValueError (torch's) for a group that no longer exists.
        """
        ranks = {name: _ranks(private.process_group(name)) for name in names}
        wanted = set().union(*ranks.values())
        candidates = [group for group in private_processes.named_groups().values() if wanted <= set(_ranks(group))]
        group = min(candidates, key=lambda group: len(_ranks(group)))  # the first of the smallest, the same on all processes
        members = _ranks(group)
        return Members(members, {name: tuple(map(members.index, of)) for name, of in ranks.items()}, group)

    def begin(self) -> None:
        """Resets the collectives before a new trace."""
        self.agreement = ProgramCollectives()
        self.calls.clear()

    def cover(self, name: str, *, evenly: bool) -> tuple[tuple[int, ...], ...] | None:
        """Returns replica groups that cover all places. The first is the process group's. The others only complete the cover: XLA wants
        every place in a group, and this process takes no part in them.

        evenly: If true, all groups must have the same size; None if that is impossible.
        """
        clique = self.cliques[name]
        rest = [place for place in range(len(self.ranks)) if place not in clique]
        size = len(clique)
        if len(rest) % size and evenly:
            return None
        size = 1 if len(rest) % size else size
        return clique, *(tuple(rest[start : start + size]) for start in range(0, len(rest), size))

    def connected(self) -> Network:
        """Returns the network for the program of the latest trace, once the processes agree on its collectives. It is created at the first
        call.

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
    """Returns a number for each process group, which differs from that of a later group with the same name."""
    found = []
    for name in names:
        group = private.process_group(name)
        if group not in _numbers:
            _numbers[group] = next(_counter)
        found.append(_numbers[group])
    return tuple(found)


# Keyed by the group object, because a later group may reuse its name.
_networks: weakref.WeakKeyDictionary[Any, list[Network]] = weakref.WeakKeyDictionary()
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_counter = itertools.count()
# Clients and agents of all networks. They are never freed, because XLA's cliques refer to them.
_kept: list[Any] = []


def _ranks(group: Any) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(group))


def _connect(group: Any, ranks: tuple[int, ...], number: int, others: frozenset[frozenset[int]]) -> Network:
    """Creates a client over the processes of a group.

    Args:
        group: The process group through whose store the processes meet.
        ranks: Its ranks, by place.
        number: The number of networks that these processes have created before.
        others: See `Members`.

    Raises: CollectiveFailed.
    """
    place, store, timeout = ranks.index(torch.distributed.get_rank()), private.store_of(group), private.timeout_of(group)
    if store is None:
        raise CollectiveFailed(
            f"the group of ranks {list(ranks)} has no store through which its processes can connect",
            hint="use options={'distributed': 'torch'}, which needs no store",
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
        # The processes' machines share a network, so gRPC must not use a proxy.
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
            hint="check that they reach each other's hosts and ports, or use options={'distributed': 'torch'}",
        ) from error
    _kept.extend([client, agent])
    return Network(devices, place, frozenset(cliques), others, made)


def _cliques(ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the places of all process groups within these ranks that contain this process, in the order of their creation."""
    groups = map(_ranks, private_processes.named_groups().values())
    return list(dict.fromkeys(tuple(map(ranks.index, group)) for group in groups if set(group) <= set(ranks)))


def _meet(devices: Sequence[jax.Device], place: int, cliques: Sequence[tuple[int, ...]]) -> None:
    """Makes XLA connect these cliques, by running a program with one collective over each in turn."""

    def program(x: jax.Array) -> jax.Array:
        for clique in cliques:
            rest = ((other,) for other in range(len(devices)) if other not in clique)
            x = private_processes.all_reduce(x, (clique, *rest), "max")
        return x

    lowered = private.lower(jax.jit(program, keep_unused=True).trace(jax.ShapeDtypeStruct((1,), np.float32)))
    run = programs.compile_lowered(lowered, devices[place], {}, among=devices)
    jax.block_until_ready(run.call([transfer.import_tensor(torch.zeros(16)[:1], devices[place])]))


def _service(host: str, count: int) -> tuple[Any, str]:
    """Starts a coordination service. It tries several ports, because another process may take a free port before the service does.

    Returns: the service and its address.
    """
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
    """Returns this machine's name, and the address at which other processes reach this one: its own address on the route to the store if
    the store has an address, else the machine's name."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    reached = socket.gethostname()
    if hasattr(store, "host"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as looking:  # connecting a UDP socket sends no packet
            try:
                looking.connect((store.host, store.port))
                reached = looking.getsockname()[0]
            except OSError:
                pass
    return {"machine": socket.gethostname(), "reached": reached}


class _Meeting:
    """Exchanges values among processes through a store. Each process sets each key once."""

    def __init__(self, store: Any, ranks: tuple[int, ...], place: int, prefix: str, seconds: float) -> None:
        self._store, self._ranks, self._place, self._prefix, self._seconds = store, ranks, place, prefix, seconds

    def say(self, what: str, value: Any) -> None:
        self._store.set(f"{self._prefix}/{what}/{self._place}", json.dumps(value))

    def hear(self, what: str, place: int) -> Any:
        return self._heard(what, [place])[0]

    def all(self, what: str, value: Any) -> list[Any]:
        """Sends this process's value, and returns the values of all processes by place."""
        self.say(what, value)
        return self._heard(what, range(len(self._ranks)))

    def _heard(self, what: str, places: Sequence[int]) -> list[Any]:
        """Waits for the values of these places, and returns them. Raises: CollectiveFailed with the ranks that did not send one in time."""
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
            f"ranks {[self._ranks[place] for place in missing]} did not connect within {self._seconds:g} s, the group's timeout, to "
            f"XLA's collectives of the ranks {list(self._ranks)}",
            hint="all of these ranks must run compiled programs with options={'distributed': 'xla'}; for fewer ranks, first create "
            "their group (torch.distributed.new_group), or use options={'distributed': 'torch'}",
        )

    def _key(self, what: str, place: int) -> str:
        return f"{self._prefix}/{what}/{place}"


def _had_networks() -> bool:
    """In a forked child: true if the parent had networks. The child does not free them."""
    for thing in _kept:
        forks.leak(thing)
    return bool(_kept)


forks.register_xla_use(_had_networks)
