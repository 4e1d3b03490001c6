"""Tests of training/recordings.py: templates are filled in after the program has run, and equal recordings share a program."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import dynaxla
from dynaxla.errors import CaptureError
from dynaxla.guards.object_walker import walk
from dynaxla.guards.slots import ABSENT
from dynaxla.guards.snapshot import ObjectAtPath, Snapshot
from dynaxla.training.recorder import Recorder
from dynaxla.training.recordings import ComputedNumber, Output, Recording, build, object_paths_of, outputs_of

X = torch.ones(3)


def snapshot_of(**surroundings: Any) -> Snapshot:
    graph = walk(surroundings)
    return Snapshot(graph, walk({}, graph), None)


def recorded(function: Callable[[], Any], seed: int = 0, **changes: Any) -> Recording:
    recorder = Recorder({"x": X}, seed, {}, set())
    changed_values: dict[str, Any] = {}
    result = recorder.run(lambda: (function(), changed_values.update({key: change() for key, change in changes.items()})), (), {})[0]
    return Recording(recorder, result, {("state", key): value for key, value in changed_values.items()}, snapshot_of(x=X))


def test_results_are_rebuilt() -> None:
    """Containers have the same types. Each tensor is built once, and tensors from before the step are themselves."""

    def function() -> Any:
        y = X * 2
        return {"a": [y, (y, X)], "b": 3, "c": collections.deque([y + 1])}

    recording = recorded(function)
    snapshot = snapshot_of(x=X)
    assert len(recording.outputs) == 2
    outputs = [torch.zeros(3), torch.ones(3)]
    leaves = [build(template, lambda output: outputs[output.index], snapshot, {}) for template in recording.result]
    result = torch.utils._pytree.tree_unflatten(leaves, recording.spec)
    assert result["a"][0] is result["a"][1][0] is outputs[0]
    assert result["a"][1][1] is X
    assert (result["b"], type(result["c"]), result["c"][0] is outputs[1]) == (3, collections.deque, True)


def test_changes_in_python() -> None:
    recording = recorded(lambda: None, new=lambda: {"step": X + 1, "name": "adam"}, gone=lambda: ABSENT, old=lambda: X)
    template = recording.changes["state", "new"]
    assert outputs_of(template) == [Output(0)]
    assert recording.changes["state", "gone"] is ABSENT
    assert object_paths_of(recording.changes["state", "old"]) == ["x"]
    assert recording.changes["state", "old"] == ObjectAtPath("x")
    output = torch.zeros(3)
    first, second = (build(template, lambda _: output, snapshot_of(x=X), {}) for _ in range(2))
    assert first == {"step": output, "name": "adam"}
    assert first is not second


def test_initial_values_call_no_collectives() -> None:
    """Not even for initial values: other processes may not record the step now. Here the group does not exist."""

    def total() -> torch.Tensor:
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(X * 2, "sum", "nobody"))

    recording = recorded(lambda: None, total=total, own=lambda: X * 2)
    initial = recording.initial_values(snapshot_of(x=X))
    assert list(initial) == [("state", "own")]
    torch.testing.assert_close(initial["state", "own"], X * 2)


def test_traced_numbers_are_recomputed() -> None:
    group = {"lr": 0.5}
    recorder = Recorder({}, 0, {}, set())
    lr = recorder.traced_numbers.at(("group", "lr"), 0.5)
    recording = Recording(recorder, None, {("group", "initial"): lr * 2}, snapshot_of())
    template = recording.changes["group", "initial"]
    assert isinstance(template, ComputedNumber)
    for value in (0.5, 0.25):
        group["lr"] = value
        assert build(template, lambda _: X, snapshot_of(group=group), {}) == value * 2


def test_new_object_of_unknown_class_is_refused() -> None:
    class Thing:
        def __init__(self) -> None:
            self.a = 1

    class Settings(dict[str, Any]):
        """A program would build a plain dict."""

    for create in (Thing, Settings):
        with pytest.raises(CaptureError, match="the step creates a"):
            recorded(lambda: None, thing=create)
        with pytest.raises(CaptureError, match="the step creates a"):
            recorded(create)


@pytest.mark.parametrize("container", [[], {"a": X}, collections.deque()])
def test_new_container_in_two_places_is_built_once(container: Any) -> None:
    recording = recorded(lambda: None, first=lambda: container, second=lambda: (container,))
    first, (second,) = recording.values_after(snapshot_of(x=X), {}).values()
    assert first is second is not container


def with_graph(is_freed: bool) -> torch.Tensor:
    y = (torch.ones(3, requires_grad=True) * X).square()
    if is_freed:
        y.sum().backward()
    return y


def test_stored_tensor_with_its_graph_is_refused() -> None:
    """A program's outputs have no graph. A freed graph, as of a loss after `backward`, is not needed."""
    with pytest.raises(CaptureError, match="stores a tensor with its graph"):
        recorded(lambda: None, hidden=lambda: with_graph(False))
    assert recorded(lambda: None, loss=lambda: with_graph(True)).outputs
    assert recorded(lambda: with_graph(False)).outputs


@pytest.mark.parametrize("create", [lambda: torch.zeros(3, requires_grad=True), lambda: torch.nn.Parameter(X * 2)])
def test_new_leaf_is_refused(create: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(CaptureError, match="new leaf tensor"):
        recorded(lambda: None, new=create)
    with pytest.raises(CaptureError, match="new leaf tensor"):
        recorded(create)


def test_initial_values_of_new_state() -> None:
    """Adam's zeros depend only on parameters. Values that depend on random numbers or on writes do not exist before the step."""
    recording = recorded(
        lambda: None,
        zeros=lambda: torch.zeros_like(X) + 1,
        drawn=lambda: torch.rand(3),
    )
    initial = recording.initial_values(snapshot_of(x=X))
    assert list(initial) == [("state", "zeros")]
    assert initial["state", "zeros"].tolist() == [1, 1, 1]


SAME: list[Callable[[], Any]] = [lambda: X * 2 + 1, lambda: (X * 2, torch.tensor(3.0)), lambda: [X.sum(), "text"]]
OTHER: list[Callable[[], Any]] = [lambda: X * 3 + 1, lambda: (X * 2, torch.tensor(4.0)), lambda: [X.mean(), "text"]]


@pytest.mark.parametrize("index", range(3))
def test_equal_recordings_share_a_program(index: int) -> None:
    first, same, other = recorded(SAME[index]), recorded(SAME[index], 1), recorded(OTHER[index])
    assert first.has_same_program(same, {})
    assert not first.has_same_program(other, {})


def test_other_order_of_results_needs_another_program() -> None:
    assert not recorded(lambda: [X * 2, X * 3]).has_same_program(recorded(lambda: [X * 2, X * 3][::-1]), {})


def test_captured_batch_updates_running_statistics_once() -> None:
    """Initial values are computed without ops that write to running statistics, which their schemas do not declare."""
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    mine, batch = copy.deepcopy(theirs), torch.randn(5, 3)
    runs = []
    for model in (mine, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(batch) ** 3).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        run = dynaxla.compile_step(step, fullgraph=True) if model is mine else step
        runs.append([[run(), *(tensor.clone() for tensor in model.state_dict().values())] for _ in range(3)])
    torch.testing.assert_close(*runs)
