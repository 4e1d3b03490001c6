"""XLA clients that span several processes, and the processes that take part in a program.

The *participants* of a program with collectives over some process groups are the ranks of the smallest process group that contains all of
these groups. A *network* is an XLA client over the participants, with one CPU device for each of them. A *clique* is XLA's word for the
devices of one collective.

The participants find each other through their process group's store, and connect through jaxlib's coordination service. XLA would connect
a clique at the clique's first use, also through the service. But the participants leave the service at once, so that a process that ends
does not end the others. So they connect the cliques of all their process groups before. Afterwards only gloo's connections remain. A
process group that is created later needs another network.
"""

from __future__ import annotations

import itertools
import json
import socket
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
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
from .tcp_connections import Endpoints, connections, matching, shut_down

# The timeout in seconds for reaching the coordination service, once all participants have called `_connect`.
_CONNECT_SECONDS = 120


@dataclass(frozen=True, eq=False)
class Network:
    """An XLA client that spans several processes. A process's *index* is its position among the participants.

    Attributes:
        devices: One device of each process, by index.
        index: This process's index.
        cliques: The connected cliques that contain this process, as tuples of indices: those of torch's process groups, and of
            `extra_cliques`.
        extra_cliques: The connected cliques that need not be process groups of torch, as sets of indices. All processes have the same sets,
            so this process need not be in them.
    """

    devices: Sequence[jax.Device]
    index: int
    cliques: frozenset[tuple[int, ...]]
    extra_cliques: frozenset[frozenset[int]]
    _connections: Mapping[int, Endpoints]

    def shut_down(self) -> None:
        """Shuts down the connections, so that running collectives fail and no process waits for another one any more."""
        shut_down(self._connections)

    @property
    def device(self) -> jax.Device:
        """This process's device."""
        return self.devices[self.index]


@dataclass(eq=False)
class Participants:
    """The processes that take part in a program with collectives.

    Attributes:
        ranks: torch's ranks of all participants, by index.
        cliques: For each process group's name, the indices of its ranks, in the group's order.
        collectives: The collectives of the program's latest trace, which the processes compare.
        calls: The names of the HLO collectives that the latest trace has emitted, in order.
        keeps_collectives: True to give the program an effect that depends on its last collective, so that XLA does not remove collectives
            whose results are unused.
        extra_cliques: Further cliques to connect, as sets of indices. All processes have the same sets.
    """

    ranks: tuple[int, ...]
    cliques: Mapping[str, tuple[int, ...]]
    _group: Any
    collectives: ProgramCollectives = field(default_factory=ProgramCollectives)
    calls: list[str] = field(default_factory=list)
    keeps_collectives: bool = False
    extra_cliques: frozenset[frozenset[int]] = frozenset()

    @staticmethod
    def of(names: Sequence[str]) -> Participants:
        """Returns the participants of a program with collectives over these process groups.

        Raises: ValueError (torch's) for a group that no longer exists.
        """
        ranks = {name: _ranks(private.process_group(name)) for name in names}
        needed = set().union(*ranks.values())
        candidates = [group for group in private_processes.named_groups().values() if needed <= set(_ranks(group))]
        group = min(candidates, key=lambda group: len(_ranks(group)))  # the first of the smallest, the same on all processes
        participants = _ranks(group)
        cliques = {name: tuple(map(participants.index, group_ranks)) for name, group_ranks in ranks.items()}
        return Participants(participants, cliques, group)

    def begin(self) -> None:
        """Forgets the collectives of the latest trace, before a new one."""
        self.collectives = ProgramCollectives()
        self.calls.clear()

    def replica_groups(self, name: str, *, evenly: bool) -> tuple[tuple[int, ...], ...] | None:
        """Returns XLA's replica groups for a collective over a process group. They contain all participants.

        The first group is the process group. The other groups, in which this process takes no part, exist because XLA requires that every
        participant is in a group.

        Args:
            name: The name of the process group.
            evenly: True if all groups must have the same size. Returns None if that is impossible.
        """
        clique = self.cliques[name]
        rest = [index for index in range(len(self.ranks)) if index not in clique]
        size = len(clique)
        if len(rest) % size and evenly:
            return None
        size = 1 if len(rest) % size else size
        return clique, *(tuple(rest[start : start + size]) for start in range(0, len(rest), size))

    def connected(self) -> Network:
        """Compares the collectives of the latest trace among the processes, and returns a network in which all their cliques are connected.

        Creates a network if there is none with these connections.

        Raises: CollectiveMismatch; CollectiveFailed.
        """
        self.collectives.agree_now()
        networks = _networks.setdefault(self._group, [])
        for network in networks:
            if network.cliques.issuperset(self.cliques.values()) and network.extra_cliques >= self.extra_cliques:
                return network
        attempt = next(_attempts.setdefault(self._group, itertools.count()))
        network = _connect(self._group, self.ranks, attempt, self.extra_cliques)
        networks.append(network)
        metrics.add("networks")
        return network


def group_numbers(names: Sequence[str]) -> tuple[int, ...]:
    """Returns a number for each process group. A later group with the same name has another number."""
    numbers = []
    for name in names:
        group = private.process_group(name)
        if group not in _numbers:
            _numbers[group] = next(_counter)
        numbers.append(_numbers[group])
    return tuple(numbers)


# Keyed by the group object, because a later group may reuse its name.
_networks: weakref.WeakKeyDictionary[Any, list[Network]] = weakref.WeakKeyDictionary()
# By group, counts the calls of `_connect`. A failed call leaves values in the group's store, which the next call must not read.
_attempts: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_counter = itertools.count()
# The XLA clients and coordination-service clients of all networks. They are never freed, because XLA's cliques refer to them.
_immortal: list[Any] = []


def _ranks(group: Any) -> tuple[int, ...]:
    """Returns the global ranks of a process group."""
    return tuple(torch.distributed.get_process_group_ranks(group))


def _connect(group: Any, ranks: tuple[int, ...], attempt: int, extra_cliques: frozenset[frozenset[int]]) -> Network:
    """Creates a network over the processes of a group.

    Args:
        group: The process group through whose store the processes find each other.
        ranks: The group's ranks, by index.
        attempt: The number of earlier calls for the same process group.
        extra_cliques: See `Participants`.

    Raises: CollectiveFailed.
    """
    index, store, timeout = ranks.index(torch.distributed.get_rank()), private.store_of(group), private.timeout_of(group)
    if store is None:
        raise CollectiveFailed(
            f"the group of ranks {list(ranks)} has no store through which its processes can connect",
            hint="use options={'distributed': 'torch'}, which needs no store",
        )
    rendezvous = _Rendezvous(store, ranks, index, f"dynaxla/network/{attempt}", timeout)
    hosts = rendezvous.exchange("here", _host(store))
    host = hosts[index]["reached"] if len({item["machine"] for item in hosts}) > 1 else "127.0.0.1"
    service, before = None, connections()
    try:
        if index == 0:
            service, address = _start_service(host, len(ranks))
            rendezvous.send("address", address)
        address = rendezvous.receive("address", 0)
        threads = str(torch.get_num_threads())
        # gRPC, by which processes reach the service, must use no proxy: the processes' machines reach each other directly.
        with c_environment("no_grpc_proxy", address.rpartition(":")[0]), c_environment("PJRT_NPROC", threads):
            agent = private_processes.make_agent(address, index, _CONNECT_SECONDS)
            agent.connect()
            client = private_processes.make_client(agent, index, len(ranks), host)
        devices = sorted(client.devices(), key=lambda device: device.process_index)
        cliques = [*_cliques(ranks), *sorted(tuple(sorted(clique)) for clique in extra_cliques if index in clique)]
        cliques = list(dict.fromkeys(cliques))
        _connect_cliques(devices, index, cliques)
        # gloo's connections are among the new TCP connections. `matching` selects those that lead to other participants.
        new = {descriptor: endpoints for descriptor, endpoints in connections().items() if before.get(descriptor) != endpoints}
        endpoints_of_all = rendezvous.exchange("connected", list(new.values()))
        new = matching(new, [(here, there) for endpoints in endpoints_of_all for here, there in endpoints])
        agent.shutdown()
        if service is not None:
            service.shutdown()
    except jax.errors.JaxRuntimeError as error:
        raise CollectiveFailed(
            f"the processes of ranks {list(ranks)} could not connect XLA's collectives: {error}",
            hint="check that they reach each other's hosts and ports, or use options={'distributed': 'torch'}",
        ) from error
    _immortal.extend([client, agent])
    return Network(devices, index, frozenset(cliques), extra_cliques, new)


def _cliques(ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the cliques of all process groups within these ranks that contain this process, in the order of their creation."""
    groups = map(_ranks, private_processes.named_groups().values())
    return list(dict.fromkeys(tuple(map(ranks.index, group)) for group in groups if set(group) <= set(ranks)))


def _connect_cliques(devices: Sequence[jax.Device], index: int, cliques: Sequence[tuple[int, ...]]) -> None:
    """Makes XLA connect these cliques, by running a program with one collective over each clique in turn."""

    def program(x: jax.Array) -> jax.Array:
        for clique in cliques:
            rest = ((process,) for process in range(len(devices)) if process not in clique)
            x = private_processes.all_reduce(x, (clique, *rest), "max")
        return x

    lowered = private.lower(jax.jit(program, keep_unused=True).trace(jax.ShapeDtypeStruct((1,), np.float32)))
    run = programs.compile_lowered(lowered, devices[index], {}, processes=devices)
    jax.block_until_ready(run.call([transfer.import_tensor(torch.zeros(16)[:1], devices[index])]))


def _start_service(host: str, count: int) -> tuple[Any, str]:
    """Starts jaxlib's coordination service. Tries several ports, because another process may take a free port before the service does.

    Returns: the service and its address.
    """
    for trial in range(8):
        with socket.socket() as probe:
            probe.bind((host, 0))
            address = f"{host}:{probe.getsockname()[1]}"
        try:
            return private_processes.make_service(address, count), address
        except jax.errors.JaxRuntimeError:
            if trial == 7:
                raise
    raise AssertionError


def _host(store: Any) -> dict[str, str]:
    """Returns this machine's name, and the address at which other processes reach this one.

    The address is that of the network interface through which this machine reaches the store. It is the machine's name if the store has
    no address, or cannot be reached.
    """
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    reached = socket.gethostname()
    if hasattr(store, "host"):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting a UDP socket sends no packet
            try:
                probe.connect((store.host, store.port))
                reached = probe.getsockname()[0]
            except OSError:
                pass
    return {"machine": socket.gethostname(), "reached": reached}


class _Rendezvous:
    """Exchanges JSON values among processes through a store. Each process sends one value under each key.

    Args:
        store: The store of a process group.
        ranks: torch's ranks of the processes, by index.
        index: This process's index.
        prefix: The prefix of all keys in the store.
        seconds: The timeout for receiving a value.
    """

    def __init__(self, store: Any, ranks: tuple[int, ...], index: int, prefix: str, seconds: float) -> None:
        self._store, self._ranks, self._index, self._prefix, self._seconds = store, ranks, index, prefix, seconds

    def send(self, key: str, value: Any) -> None:
        """Sends this process's value."""
        self._store.set(self._store_key(key, self._index), json.dumps(value))

    def receive(self, key: str, index: int) -> Any:
        """Waits for the value of one process, and returns it."""
        return self._receive_all(key, [index])[0]

    def exchange(self, key: str, value: Any) -> list[Any]:
        """Sends this process's value, waits for the values of all processes, and returns them by index."""
        self.send(key, value)
        return self._receive_all(key, range(len(self._ranks)))

    def _receive_all(self, key: str, indices: Sequence[int]) -> list[Any]:
        """Waits for the values of these processes, and returns them.

        Raises: CollectiveFailed with the ranks of the processes that did not send one in time.
        """
        end, pause = time.monotonic() + self._seconds, 0.001
        missing = list(indices)
        while True:
            missing = [index for index in missing if not self._store.check([self._store_key(key, index)])]
            if not missing:
                return [json.loads(self._store.get(self._store_key(key, index))) for index in indices]
            if time.monotonic() > end:
                break
            time.sleep(pause)
            pause = min(1.5 * pause, 0.05)
        raise CollectiveFailed(
            f"ranks {[self._ranks[index] for index in missing]} did not connect within {self._seconds:g} s, the group's timeout, to "
            f"XLA's collectives of the ranks {list(self._ranks)}",
            hint="all of these ranks must run compiled programs with options={'distributed': 'xla'}; for fewer ranks, first create "
            "their group (torch.distributed.new_group), or use options={'distributed': 'torch'}",
        )

    def _store_key(self, key: str, index: int) -> str:
        return f"{self._prefix}/{key}/{index}"


def _had_networks() -> bool:
    """In a forked child: returns true if the parent had networks. The child never frees them."""
    for item in _immortal:
        forks.leak(item)
    return bool(_immortal)


forks.register_xla_use(_had_networks)
