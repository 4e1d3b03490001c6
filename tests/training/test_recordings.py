"""Templates: what is not there yet has a stand-in, and is put in when the program has run. Equal recordings are one program."""

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


def state(**surroundings: Any) -> Snapshot:
    around = walk(surroundings)
    return Snapshot(around, walk({}, around), None)


def recorded(function: Callable[[], Any], seed: int = 0, **changes: Any) -> Recording:
    recorder = Recorder({"x": X}, seed, {}, set())
    found: dict[str, Any] = {}
    result = recorder.run(lambda: (function(), found.update({key: change() for key, change in changes.items()})), (), {})[0]
    return Recording(recorder, result, {("state", key): value for key, value in found.items()}, state(x=X))


def test_a_result_is_built_again() -> None:
    """Of containers of the same kinds, each tensor once, with what was there before as it is."""

    def function() -> Any:
        y = X * 2
        return {"a": [y, (y, X)], "b": 3, "c": collections.deque([y + 1])}

    recording = recorded(function)
    found = state(x=X)
    assert len(recording.outputs) == 2
    made = [torch.zeros(3), torch.ones(3)]
    leaves = [build(template, lambda output: made[output.index], found) for template in recording.result]
    result = torch.utils._pytree.tree_unflatten(leaves, recording.spec)
    assert result["a"][0] is result["a"][1][0] is made[0]
    assert result["a"][1][1] is X
    assert (result["b"], type(result["c"]), result["c"][0] is made[1]) == (3, collections.deque, True)


def test_changes_in_python() -> None:
    recording = recorded(lambda: None, new=lambda: {"step": X + 1, "name": "adam"}, gone=lambda: ABSENT, old=lambda: X)
    template = recording.changes["state", "new"]
    assert outputs_of(template) == [Output(0)]
    assert recording.changes["state", "gone"] is ABSENT
    assert object_paths_of(recording.changes["state", "old"]) == ["x"]
    assert recording.changes["state", "old"] == ObjectAtPath("x")
    made = torch.zeros(3)
    first, second = (build(template, lambda _: made, state(x=X)) for _ in range(2))
    assert first == {"step": made, "name": "adam"}
    assert first is not second


def test_a_recording_calls_no_collectives() -> None:
    """Not for new state either: other processes may have recorded the step before, or cannot. Here nobody has the group."""

    def total() -> torch.Tensor:
        return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(X * 2, "sum", "nobody"))

    recording = recorded(lambda: None, total=total, own=lambda: X * 2)
    found = recording.initial_values(state(x=X))
    assert list(found) == [("state", "own")]
    torch.testing.assert_close(found["state", "own"], X * 2)


def test_numbers_are_computed_again() -> None:
    group = {"lr": 0.5}
    recorder = Recorder({}, 0, {}, set())
    lr = recorder.traced_numbers.at(("group", "lr"), 0.5)
    recording = Recording(recorder, None, {("group", "initial"): lr * 2}, state())
    template = recording.changes["group", "initial"]
    assert isinstance(template, ComputedNumber)
    for value in (0.5, 0.25):
        group["lr"] = value
        assert build(template, lambda _: X, state(group=group)) == value * 2


def test_objects_that_a_step_leaves_behind() -> None:
    class Thing:
        def __init__(self) -> None:
            self.a = 1

    with pytest.raises(CaptureError, match="the step creates a"):
        recorded(lambda: None, thing=Thing)


def test_new_state_is_made_beforehand() -> None:
    """Adam's zeros depend on nothing but parameters; what depends on a draw or on what was written does not exist before the step."""
    recording = recorded(
        lambda: None,
        zeros=lambda: torch.zeros_like(X) + 1,
        drawn=lambda: torch.rand(3),
    )
    found = recording.initial_values(state(x=X))
    assert list(found) == [("state", "zeros")]
    assert found["state", "zeros"].tolist() == [1, 1, 1]


SAME: list[Callable[[], Any]] = [lambda: X * 2 + 1, lambda: (X * 2, torch.tensor(3.0)), lambda: [X.sum(), "text"]]
OTHER: list[Callable[[], Any]] = [lambda: X * 3 + 1, lambda: (X * 2, torch.tensor(4.0)), lambda: [X.mean(), "text"]]


@pytest.mark.parametrize("index", range(3))
def test_which_recordings_are_one_program(index: int) -> None:
    one, again, other = recorded(SAME[index]), recorded(SAME[index], 1), recorded(OTHER[index])
    assert one.has_same_program(again, {})
    assert not one.has_same_program(other, {})


def test_results_in_another_order_are_another_program() -> None:
    assert not recorded(lambda: [X * 2, X * 3]).has_same_program(recorded(lambda: [X * 2, X * 3][::-1]), {})


def test_a_batch_around_the_step_changes_running_statistics_once() -> None:
    """What is made beforehand is made without the ops that write to statistics, which their schemas do not say."""
    theirs = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    mine, batch = copy.deepcopy(theirs), torch.randn(5, 3)
    found = []
    for model in (mine, theirs):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(model: torch.nn.Module = model, optimizer: torch.optim.Optimizer = optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(batch) ** 3).mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        take = dynaxla.compile_step(step, fullgraph=True) if model is mine else step
        found.append([[take(), *(tensor.clone() for tensor in model.state_dict().values())] for _ in range(3)])
    torch.testing.assert_close(*found)
