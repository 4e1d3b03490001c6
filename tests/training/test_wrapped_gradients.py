"""Gradients that wrap another tensor, as DTensors do, and stay after a step: calls cost as much as with plain gradients.

Each test runs in its own process, which is a process group by itself: a process group is global to its process."""

from __future__ import annotations

import pytest
import torch

from support.processes.scripts import run_script
from support.releases import not_in_oldest
from support.timing import quick_compilation

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="this torch has no gloo"
)

START = """
import copy
import weakref
from collections import Counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import dynaxla
from dynaxla.guards import object_graph, object_walker, snapshot

torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
visits, metas, walks = Counter(), Counter(), []


def counted(function, counter, name):
    def call(*args):
        counter[name] += 1
        return function(*args)

    return call


object_walker.Visitor._visit = counted(object_walker.Visitor._visit, visits, "visits")
object_graph.metadata_of = counted(object_graph.metadata_of, metas, "metas")
search = snapshot.walk
snapshot.walk = lambda roots, *rest: walks.append(list(roots)) or search(roots, *rest)


def network(way):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4, bias=False))
    if way == "tensor parallel":
        return parallelize_module(net, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return fully_shard(net, mesh=mesh) if way == "fsdp" else net


def shown(gradient):
    if not isinstance(gradient, DTensor):
        return str(gradient)
    return f"{gradient.placements} {list(gradient._local_tensor.shape)} {gradient.requires_grad}"


def made(way, compiled):
    net = network(way)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def step(x):
        said = [shown(parameter.grad) for parameter in net.parameters() if way == "tensor parallel"]
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach(), said

    return net, dynaxla.compile_step(step, fullgraph=True) if compiled else step


def same(one, other):
    for mine, theirs in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.detach(), theirs.detach())
        assert (mine.grad is None) == (theirs.grad is None), (mine.grad, theirs.grad)
        if mine.grad is not None:
            assert not isinstance(theirs.grad, DTensor) or shown(mine.grad) == shown(theirs.grad)
            torch.testing.assert_close(mine.grad, theirs.grad)
"""

WORK = """
work = {}
for way in ("plain", "tensor parallel", "fsdp"):
    (one, eager), (other, step) = made(way, False), made(way, True)
    for number in range(5):
        x = torch.randn(3, 4)
        expected, _ = eager(x)
        old = [parameter.grad for parameter in other.parameters() if number > 2]
        old = [weakref.ref(item) for gradient in old for item in (gradient, getattr(gradient, "_local_tensor", gradient))]
        gradient = None
        walks.clear(), visits.clear(), metas.clear()
        loss, _ = step(x)
        torch.testing.assert_close(loss, expected)
        same(one, other)
        assert not any(item() is not None for item in old), way
    assert walks == [["args", "kwargs"]], (way, walks)
    tensors = sum(1 + isinstance(parameter, DTensor) for parameter in other.parameters())
    work[way] = visits["visits"], metas["metas"] - 2 * tensors
# What the arguments cost; and of each gradient, and of what it wraps, what it was and what it is like.
assert work["plain"] == work["tensor parallel"] == work["fsdp"], work
print(work)
"""

CHANGES = """
def first(net):
    return next(net.parameters())

def shared(net):
    first(net).grad._local_tensor = list(net.parameters())[2].grad._local_tensor

def replicated(tensor):
    tensor._spec = DTensor.from_local(tensor._local_tensor.detach(), mesh, [Replicate()])._spec

changes = {
    "local tensor of a gradient": lambda net: setattr(first(net).grad, "_local_tensor", first(net).grad._local_tensor.clone()),
    "size of it": lambda net: setattr(first(net).grad, "_local_tensor", torch.ones(2, 4)),
    "shared memory": shared,
    "placements of a gradient": lambda net: replicated(first(net).grad),
    "no gradient": lambda net: setattr(first(net), "grad", None),
    "another gradient": lambda net: setattr(first(net), "grad", distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])),
    "requires_grad of a gradient": lambda net: first(net).grad.requires_grad_(),
    "requires_grad of what it wraps": lambda net: first(net).grad._local_tensor.requires_grad_(),
    "gradient of a gradient": lambda net: setattr(first(net).grad, "grad", first(net).grad.clone()),
    "local tensor of a parameter": lambda net: setattr(first(net), "_local_tensor", first(net)._local_tensor.detach().clone()),
    "requires_grad of a parameter": lambda net: first(net).requires_grad_(False),
    "requires_grad of it again": lambda net: first(net).requires_grad_(True),
}
(one, eager), (other, step) = made("tensor parallel", False), made("tensor parallel", True)
for name, change in changes.items():
    for number in range(5):
        x = torch.randn(3, 4)
        if number == 2:
            change(one), change(other)
        walks.clear()
        found, expected = step(x), eager(x)
        assert found[1] == expected[1], (name, number, found[1], expected[1])
        torch.testing.assert_close(found[0], expected[0])
        same(one, other)
        assert number != 2 or ["step"] in walks, name
    assert walks == [["args", "kwargs"]], (name, walks)
print(len(changes))
"""


@not_in_oldest("FSDP2 whose steps can be recorded")
def test_calls_cost_as_much_as_with_plain_gradients() -> None:
    """A call does not walk the step's objects, and old gradients are freed."""
    print(run_script(START + WORK, XLA_FLAGS=quick_compilation.flags()))


def test_changes_are_noticed() -> None:
    """Another spec of a DTensor is noticed, too. Changes inside a spec are not: torch hashes specs, and does not change them."""
    print(run_script(START + CHANGES, XLA_FLAGS=quick_compilation.flags()))
