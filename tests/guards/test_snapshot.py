"""Tests of guards/snapshot.py: states that can share a program have equal keys, and changed state is restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dynaxla.errors import CaptureError
from dynaxla.guards.observation import observe
from dynaxla.guards.slots import ABSENT
from dynaxla.guards.snapshot import FunctionGuards, ObjectAtPath
from support import internals

pytestmark = pytest.mark.quick
X = torch.ones(3)


def guards_of(function: Callable[..., Any], *args: Any) -> FunctionGuards:
    """Returns guards that have observed one call. An earlier call runs code that runs only once in a process, such as imports."""
    function(*args)
    guards = FunctionGuards(function, 8)
    _, observation = observe(function, args, {})
    assert guards.widen(observation.codes, set())
    assert guards.has_run
    return guards


def test_equal_states_have_equal_keys() -> None:
    scale = {"by": "two", "unread": 1}

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if scale["by"] == "two" else x

    guards = guards_of(function, X)
    first = guards.take([X], {})
    assert guards.take([torch.zeros(3)], {}).key == first.key
    assert guards.take([torch.ones(4)], {}).key != first.key
    with torch.no_grad():
        assert guards.take([X], {}).key != first.key
    scale["by"] = "three"
    assert guards.take([X], {}).key != first.key
    assert guards.compare_with(first) == ("scale['by']", False)
    scale["by"] = "two"
    assert guards.take([X], {}).key == first.key
    assert guards.compare_with(first) == ("", False)


def test_learning_rates_and_arrays_may_change_until_they_are_compared() -> None:
    model, data = nn.Linear(3, 1), np.ones(3, np.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def function() -> None:
        model(torch.from_numpy(data)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    guards = guards_of(function)
    first = guards.take((), {})
    optimizer.param_groups[0]["lr"] = 0.2
    data += 1
    same = guards.take((), {})
    assert same.key == first.key
    assert same.number_at(next(iter(guards.numbers(same.surroundings)))) == 0.2
    assert same.input_at(next(iter(guards.arrays(same.surroundings)))).tolist() == [2, 2, 2]
    guards.guard_numbers_by_value(guards.numbers(same.surroundings))
    keys = []
    for lr in (0.3, 0.4):
        optimizer.param_groups[0]["lr"] = lr
        keys.append(guards.take((), {}).key)
    guards.guard_arrays_by_value(guards.arrays(same.surroundings))
    guards.forget_surroundings()
    for _ in range(2):
        keys.append(guards.take((), {}).key)
        data += 1
    assert len({first.key, *keys}) == 5


def test_numbers_may_change_after_their_first_change() -> None:
    """The optimizer may also be an argument. Types are compared."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    def function(argument: torch.optim.Optimizer) -> None:
        model(X).sum().backward()
        argument.step()

    for in_arguments in (False, True):
        arguments = (optimizer,) if in_arguments else ()
        guards = guards_of(function, *arguments) if in_arguments else guards_of(lambda: function(optimizer))

        def key(guards: FunctionGuards = guards, arguments: Any = arguments, **settings: Any) -> Any:
            optimizer.param_groups[0].update(settings)
            return guards.take(arguments, {}).key

        first = key(betas=(0.9, 0.999), weight_decay=0, eps=1e-8)
        changed = key(betas=(0.8, 0.999))
        assert changed != first
        assert key(betas=(0.7, 0.99), lr=0.3) == changed
        decayed = key(weight_decay=0.1)
        assert decayed != changed
        assert key(weight_decay=0.2) == key(weight_decay=0.0) == decayed
        assert key(weight_decay=0) not in (decayed, changed)  # 0.0 is no int
        assert key(eps=1e-5, weight_decay=0.1) != decayed


def test_numbers_in_containers_may_change_unless_code_asks_for_types() -> None:
    state = {"count": 1, "name": "a", "sizes": (1, 2)}
    guards = guards_of(lambda x: (x * state["count"], state["name"], state["sizes"]), X)
    asking_guards = guards_of(lambda x: x * state["count"] if type(x) is torch.Tensor else x, X)
    keys, asking_keys = [], []
    for count in range(4):
        state |= {"count": count, "sizes": (count, 2)}
        keys.append(guards.take([X, count], {"by": 2.0 * count}).key)
        asking_keys.append(asking_guards.take([X], {}).key)
    assert keys[0] != keys[1] == keys[2] == keys[3]
    assert len(set(asking_keys)) == 4
    state["name"] = "b"
    assert guards.take([X, 5], {"by": 3.0}).key not in keys


def test_changed_entries_are_restored() -> None:
    state: dict[Any, Any] = {"count": 1, "kept": X}
    items = [1, 2]

    def function(x: torch.Tensor, box: list[Any]) -> Any:
        return state["count"], items[0], state.get("new"), box

    box = [X]
    guards = guards_of(function, X, box)
    snapshot = guards.take([X, box], {})
    state["count"] += 1
    state["new"] = X
    del state["kept"]
    items.append(3)
    box[0] = None
    assert {(path, key): value for (path, key), value in snapshot.changes().items()} == {
        ("state", "kept"): ABSENT,
        ("state", "count"): 2,
        ("state", "new"): X,
        ("items", 2): 3,
        ("args[1]", 0): None,
    }
    snapshot.restore()
    assert (state, items, box) == ({"count": 1, "kept": X}, [1, 2], [X])
    assert not snapshot.changes()
    snapshot.put({("state", "count"): 5, ("state", "kept"): ABSENT, ("args[1]", 0): 7})
    assert (state, box) == ({"count": 5}, [7])
    assert snapshot.object_at(str(snapshot.path_of(X))) is X
    snapshot.put({("state", ObjectAtPath(str(snapshot.path_of(X)))): 1})
    assert state[X] == 1


def test_new_code_widens_the_guards() -> None:
    shift = {"by": 1.0}

    def function(x: torch.Tensor, flag: bool) -> torch.Tensor:
        return add(x) if flag else x

    def add(x: torch.Tensor) -> torch.Tensor:
        return x + shift["by"]

    guards = guards_of(function, X, False)
    key = guards.take([X, False], {}).key
    shift["by"] = 2.0
    assert guards.take([X, False], {}).key == key  # this call reads no shift
    _, observation = observe(function, (X, True), {})
    assert guards.widen(observation.codes, set())
    assert not guards.widen(observation.codes, set())
    key = guards.take([X, True], {}).key
    shift["by"] = 3.0
    assert guards.take([X, True], {}).key != key


def test_code_without_a_path_is_refused() -> None:
    def function() -> int:
        return eval("lambda: 3")()

    guards = guards_of(function)
    with pytest.raises(CaptureError, match="a function that dynaxla cannot find"):
        guards.check_reached(guards.take((), {}))
    assert not guards.has_run


def test_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    internals.most_guarded_values(monkeypatch, 10)
    data = [float(number) for number in range(20)]
    guards = guards_of(lambda: data[0])
    with pytest.raises(CaptureError, match="can reach more than 10 values"):
        guards.take((), {})
