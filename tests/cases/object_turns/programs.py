"""A random step, a random order of calls, and the comparison with eager mode.

XLA compiles the programs of two seeds in ten. For the other seeds, torch's kernels run the recorded graph, because compiling takes most of
the time, and these tests check only from which containers a call reads tensors and to which it writes them.

Each set of objects (`Objects`) starts without state of the optimizer, without gradients and with empty containers. A call must create new
tensors in the objects that it was called with.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import dynaxla
from support import internals
from support.timing import quick_compilation

OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr, momentum=0.9),
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "rmsprop": lambda parameters, lr: torch.optim.RMSprop(parameters, lr, momentum=0.5),
    "adagrad": torch.optim.Adagrad,
}


class Objects:
    """A model, its optimizer, and containers for the tensors that a step creates."""

    def __init__(self, seed: int, optimizer: str, lr: float, layers: int) -> None:
        torch.manual_seed(seed)
        self.model: Any = nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)])
        self.model.register_buffer("mean", None)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), lr)
        self.average: dict[nn.Parameter, torch.Tensor] = {}
        self.metrics: dict[str, torch.Tensor] = {}
        self.items: list[torch.Tensor | None] = [None, None]
        self.bag = SimpleNamespace()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """All tensors that a step may have created, by name; None if it has not."""
        yield from self.model.named_buffers()
        for name, parameter in self.model.named_parameters():
            yield name, parameter
            yield f"{name}.grad", parameter.grad
            yield from ((f"{name}.{key}", value) for key, value in self.optimizer.state.get(parameter, {}).items())
            yield f"{name}.average", self.average.get(parameter)
        yield from self.metrics.items()
        yield from ((f"items.{index}", item) for index, item in enumerate(self.items))
        yield from vars(self.bag).items()


Action = Callable[[Objects, torch.Tensor, torch.Tensor], None]


def average(objects: Objects, x: torch.Tensor, loss: torch.Tensor) -> None:
    with torch.no_grad():
        for parameter in objects.model.parameters():
            if parameter in objects.average:
                objects.average[parameter].lerp_(parameter, 0.25)
            else:
                objects.average[parameter] = parameter.clone()


def metric(objects: Objects, x: torch.Tensor, loss: torch.Tensor) -> None:
    objects.metrics["loss"] = loss.detach() * 2


def total(objects: Objects, x: torch.Tensor, loss: torch.Tensor) -> None:
    objects.metrics["total"] = objects.metrics["total"] + loss.detach() if "total" in objects.metrics else loss.detach().clone()


def item(objects: Objects, x: torch.Tensor, loss: torch.Tensor) -> None:
    objects.items[1], objects.items[0] = objects.items[0], x.mean(0)


def attribute(objects: Objects, x: torch.Tensor, loss: torch.Tensor) -> None:
    objects.bag.last = getattr(objects.bag, "last", 0) + loss.detach()


def buffer(objects: Objects, x: torch.Tensor, loss: torch.Tensor) -> None:
    if objects.model.mean is None:
        objects.model.mean = x.mean(0)
    else:
        objects.model.mean.mul_(0.5).add_(x.mean(0))


def gradient(objects: Objects, x: torch.Tensor, loss: torch.Tensor) -> None:
    objects.bag.gradient = objects.model[0].weight.grad.clone() if objects.model[0].weight.grad is not None else None


ACTIONS: tuple[Action, ...] = (average, metric, total, item, attribute, buffer, gradient)


def make_step(draw: random.Random) -> Callable[[Objects, torch.Tensor], torch.Tensor]:
    """Returns a step that trains and creates some tensors, in a random order."""
    actions = draw.sample(ACTIONS, draw.randint(0, 3))
    position = draw.randint(0, len(actions))
    zero = draw.choice([True, False, None])

    def train(objects: Objects, x: torch.Tensor, loss: torch.Tensor) -> None:
        loss.backward()
        objects.optimizer.step()
        if zero is not None:
            objects.optimizer.zero_grad(set_to_none=zero)

    actions.insert(position, train)

    def step(objects: Objects, x: torch.Tensor) -> torch.Tensor:
        loss = objects.model(x).square().mean()
        for action in actions:
            action(objects, x, loss)
        return loss.detach()

    return step


def between(draw: random.Random, objects: Objects) -> None:
    """Changes the objects between two calls; in most cases, it changes nothing."""
    change = draw.choice(["nothing"] * 8 + ["learning rate", "state", "metrics", "gradients"])
    if change == "learning rate":
        objects.optimizer.param_groups[0]["lr"] *= 0.5
    elif change == "state":
        objects.optimizer.load_state_dict(objects.optimizer.state_dict())
    elif change == "metrics":
        objects.metrics.clear()
    elif change == "gradients":
        objects.optimizer.zero_grad()


def order_of_calls(draw: random.Random, sets: int) -> list[int]:
    kind = draw.choice(["turns", "blocks", "random"])
    if kind == "turns":
        return [number % sets for number in range(4 * sets)]
    if kind == "blocks":
        return [number for number in range(sets) for _ in range(4)]
    return [draw.randrange(sets) for _ in range(5 * sets)]


def run(seed: int, wrap: Callable[[Any], Any]) -> tuple[list[torch.Tensor], list[Objects]]:
    """Returns all losses, and the objects after the calls.

    Args:
        wrap: takes the step, and returns the function to call.
    """
    draw = random.Random(seed)
    optimizer, layers, sets = draw.choice(list(OPTIMIZERS)), draw.randint(1, 2), draw.randint(2, 4)
    all_objects = [Objects(10 * seed + number, optimizer, draw.choice([0.1, 0.05]), layers) for number in range(sets)]
    call = wrap(make_step(draw))
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for number in order_of_calls(draw, sets):
        between(draw, all_objects[number])
        losses.append(call(all_objects[number], torch.randn(4, 3, generator=generator)).clone())
    return losses, all_objects


def differences(seed: int) -> str:
    """Returns the first difference of a program from eager mode, or "" if there is none."""
    fullgraph = seed % 2 == 0
    expected, expected_objects = run(seed, lambda step: step)
    with pytest.MonkeyPatch.context() as patch:
        if seed % 10 not in (0, 5):
            internals.recorded_graphs_run_by_torch(patch)
        losses, all_objects = run(
            seed, lambda step: dynaxla.compile_step(step, fullgraph=fullgraph, options={"xla": quick_compilation.options()})
        )
    try:
        torch.testing.assert_close(losses, expected, rtol=1e-3, atol=1e-5)
        for number, (objects, other) in enumerate(zip(all_objects, expected_objects, strict=True)):
            found, expected_tensors = dict(objects.tensors()), dict(other.tensors())
            assert found.keys() == expected_tensors.keys(), f"set {number} has {found.keys() ^ expected_tensors.keys()}"
            for name, tensor in expected_tensors.items():
                assert (found[name] is None) == (tensor is None), f"set {number}: {name}"
                if tensor is not None:
                    torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
        tensors = [
            (number, name, tensor) for number, objects in enumerate(all_objects) for name, tensor in objects.tensors() if tensor is not None
        ]
        owners: dict[int, int] = {}
        for number, name, tensor in tensors:
            assert owners.setdefault(tensor.data_ptr(), number) == number, f"{name} of set {number} is shared with another set"
    except AssertionError as error:
        return f"program {seed}: {error}"
    return ""
