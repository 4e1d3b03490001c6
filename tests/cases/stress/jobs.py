"""The jobs of a thread. The expected results come from eager mode.

All threads call the shared programs, with different values. The other programs belong to one thread.
"""

from __future__ import annotations

import copy
import itertools
import random
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

import dynaxla

Function = Callable[..., Any]
# A piece of work; raises if a result is wrong.
Job = Callable[[], None]


@torch.library.custom_op("dynaxla_stress::note", mutates_args=())
def note(x: torch.Tensor, factor: float) -> torch.Tensor:
    if x.dim() == 1:
        notes.append(x)
    return x * factor


note.register_fake(lambda x, factor: torch.empty_like(x))
note.register_autograd(
    lambda ctx, grad: (note(grad.contiguous(), ctx.factor), None),
    setup_context=lambda ctx, inputs, output: setattr(ctx, "factor", inputs[1]),
)
notes: list[torch.Tensor] = []


class Refused(Exception):
    """The exception of an op, with the number of the thread whose values the op got."""


@torch.library.custom_op("dynaxla_stress::refuse", mutates_args=())
def refuse(x: torch.Tensor) -> torch.Tensor:
    if x[0] < 0:
        raise Refused(int(-x[0]))
    return x + 1


refuse.register_fake(torch.empty_like)


class Shared:
    """Programs that all threads call. The first caller compiles each of them.

    Args:
        compile: `torch.compile` for one backend.
    """

    def __init__(self, compile: Function) -> None:
        torch.manual_seed(0)
        self.eager_net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)).eval()
        self.net = compile(self.eager_net)
        self.convolution = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2)).eval()
        self.convolve = compile(self.convolution)
        self.sized = compile(_sized, dynamic=True, options={"executables": 2})
        self.noted = compile(_noted)
        self.refused = compile(_refused)
        self.indexed = compile(_indexed)
        self.chosen = compile(_chosen)


def _sized(x: torch.Tensor) -> torch.Tensor:
    return (x * 2 + 1).softmax(-1).cumsum(-1)


def _noted(x: torch.Tensor) -> torch.Tensor:
    return note(x + 1, 2.0).sin()


def _refused(x: torch.Tensor) -> torch.Tensor:
    return refuse(x * 2) * 3


def _indexed(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x[index] * 2


def _chosen(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0] * 3


def jobs(number: int, seed: int, shared: Shared, compile: Function) -> dict[str, Job]:
    """Returns the jobs of one thread, by name.

    Args:
        number: the number of the thread, starting at 1.
        seed: the seed of the run.
        shared: the shared programs.
        compile: `torch.compile` for one backend.
    """
    draw = torch.Generator().manual_seed(seed * 1000 + number)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    xs = [randn(5, 8) for _ in range(4)]
    images = [randn(2, 3, 12, 12) for _ in range(2)]
    rows = [randn(3, size) for size in (4, 7, 9, 16)]
    result: dict[str, Job] = {
        "model": _agreement(shared.net, shared.eager_net, xs),
        "convolution": _agreement(shared.convolve, shared.convolution, images),
        "sizes": _agreement(shared.sized, _sized, rows),
        "choice": _agreement(shared.chosen, _chosen, [randn(20) for _ in range(3)]),
        "note": _notes(shared.noted, float(number)),
        "refusal": _refusals(shared.refused, number),
        "index": _indices(shared.indexed, randn(10), number),
        "gradients": _gradients(compile, xs),
        "new function": _new_functions(compile, xs[0], number),
        "frozen": _frozen(compile, xs),
        "step": _steps(xs[:2], number),
    }
    return result


def _close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


def _agreement(compiled: Function, eager: Function, inputs: list[torch.Tensor]) -> Job:
    with torch.no_grad():
        turns = itertools.cycle([(x, eager(x)) for x in inputs])

    def job() -> None:
        x, expected = next(turns)
        with torch.no_grad():
            _close(compiled(x), expected)

    return job


def _notes(compiled: Function, value: float) -> Job:
    """A custom op stores its argument. This thread's arguments must be there, unchanged."""
    x = torch.full((64,), value)
    expected = ((x + 1) * 2).sin()

    def job() -> None:
        _close(compiled(x), expected)
        mine = [item for item in list(notes) if item[0] == value + 1]
        assert mine, "the op has not got this thread's values"
        assert all(bool((item == value + 1).all()) for item in mine), "a stored argument of the op has changed"
        del notes[: max(0, len(notes) - 200)]

    return job


def _raised(kind: type[Exception], call: Function, *args: Any) -> Exception:
    try:
        call(*args)
    except kind as error:
        return error
    raise AssertionError("nothing was raised")


def _refusals(compiled: Function, number: int) -> Job:
    bad, good = torch.full((4,), -number / 2), torch.full((4,), float(number))

    def job() -> None:
        caught = _raised(Refused, compiled, bad)
        assert caught.args == (number,), f"thread {number} got the exception of thread {caught.args[0]}"
        _close(compiled(good), (good * 2 + 1) * 3)

    return job


def _indices(compiled: Function, x: torch.Tensor, number: int) -> Job:
    good, bad = torch.tensor([number, 0]), torch.tensor([0, 10 + number])
    expected = _indexed(x, good)

    def job() -> None:
        _close(compiled(x, good), expected)
        _raised(IndexError, compiled, x, bad)

    return job


def _gradients(compile: Function, inputs: list[torch.Tensor]) -> Job:
    torch.manual_seed(int(inputs[0].sum() * 1000))
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def loss(net: Function, x: torch.Tensor) -> torch.Tensor:
        return (note(net(x), 3.0) ** 2).mean()

    turns = itertools.cycle([(x, torch.autograd.grad(loss(net, x), list(net.parameters()))) for x in inputs])
    compiled = compile(lambda x: loss(net, x))

    def job() -> None:
        x, expected = next(turns)
        _close(torch.autograd.grad(compiled(x), list(net.parameters())), expected)

    return job


def _new_functions(compile: Function, x: torch.Tensor, number: int) -> Job:
    """Compiles and calls a new function each time."""
    counts = itertools.count(number * 100_000)

    def job() -> None:
        count = next(counts)

        def function(x: torch.Tensor) -> torch.Tensor:
            return (x @ x.t() + scale).relu().sum(0)

        scale = float(count % 7)
        own = types.FunctionType(function.__code__.replace(co_name=f"function_{count}"), globals(), "new", None, function.__closure__)
        _close(compile(own)(x), (x @ x.t() + scale).relu().sum(0))
        # With any backend, torch 2.13 never frees compiled code objects, nor the code compiled from them.
        torch._C._dynamo.eval_frame.reset_code(own.__code__)

    return job


def _frozen(compile: Function, inputs: list[torch.Tensor]) -> Job:
    """Weights change between calls, and values computed from frozen weights must be updated."""
    torch.manual_seed(int(inputs[1].sum() * 1000))
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()).eval().requires_grad_(False)
    weights = [torch.randn(8, 8) for _ in range(3)]
    cases = []
    for weight, x in itertools.product(weights, inputs):
        net[0].weight.copy_(weight)
        cases.append((weight, x, net(x)))
    turns = itertools.cycle(cases)
    compiled = compile(net, options={"freeze": True})

    def job() -> None:
        weight, x, expected = next(turns)
        with torch.no_grad():
            net[0].weight.copy_(weight)
            _close(compiled(x), expected)

    return job


_STEPS = 6


def _steps(inputs: list[torch.Tensor], number: int) -> Job:
    """A few training steps, repeated from the same start."""
    torch.manual_seed(number)
    net = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))
    kinds: list[Function] = [
        lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    ]
    optimizer = kinds[number % len(kinds)](net.parameters())
    start = copy.deepcopy((net.state_dict(), optimizer.state_dict()))

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def restart() -> None:
        net.load_state_dict(start[0])
        optimizer.load_state_dict(copy.deepcopy(start[1]))

    xs = list(itertools.islice(itertools.cycle(inputs), _STEPS))
    expected = [(x, step(x), [parameter.detach().clone() for parameter in net.parameters()]) for x in xs]
    restart()
    compiled = dynaxla.compile_step(step, fullgraph=True)
    remaining: Iterator[Any] = iter(expected)

    def job() -> None:
        nonlocal remaining
        call, rest = next(remaining, None), remaining
        if call is None:
            restart()
            rest = iter(expected)
            call = next(rest)
        remaining = iter(())  # after a step that fails, the next job restarts
        x, loss, parameters = call
        _close(compiled(x), loss)
        _close([parameter.detach() for parameter in net.parameters()], parameters)
        remaining = rest

    return job


def choose(jobs: dict[str, Job], draw: random.Random) -> str:
    """Returns the name of the next job. Jobs that compile every time are less frequent."""
    return draw.choices(list(jobs), [0.1 if name == "new function" else 1.0 for name in jobs])[0]
