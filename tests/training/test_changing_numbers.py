"""compile_step with Python numbers that change between calls: results and state as in eager mode, by one program where possible."""

from __future__ import annotations

import copy
import math
import pickle
import re
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dynaxla
from dynaxla.observe import metrics

X = torch.linspace(-2, 3, 12).reshape(3, 4)
LAYERS: list[Callable[[torch.Tensor], torch.Tensor]] = [lambda y: y * 2, lambda y: y + 1, torch.sin, lambda y: y - 3]
INTEGERS = [1, 2, 3, 4, 5, 2, 7, 3, 9, 10, 1, 0, 12]
FLOATS = [0.5, 0.25, 1.5, 2.0, -1.0, 0.0, 0.3, 0.7, 1.0, math.inf, 3.5, -0.0]


def apply(x: torch.Tensor, layers: Sequence[Any]) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def count_up(x: torch.Tensor, n: int) -> torch.Tensor:
    k = 0
    while k < n:
        x, k = x + 1, k + 1
    return x


def caught(x: torch.Tensor, n: int) -> torch.Tensor:
    """Catches the error that a traced number would cause."""
    try:
        return x.clamp(max=n) + range(n)[0]
    except TypeError:
        return x * 100
    except IndexError:
        return x * 7


def refused_above_8(x: torch.Tensor, n: int) -> torch.Tensor:
    if n > 8:
        raise ValueError("too large")
    return x * 2


# Python uses the number only in arithmetic and comparisons, so programs serve nearly all calls.
INPUTS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "product": lambda x, n: x * n,
    "signs of zero": lambda x, n: torch.stack([1 / (x[:2] * 0 + n * 0.0), 1 / (x[:2] * 0 + n * -0.0)]),
    "tensor": lambda x, n: torch.tensor(n) + x.int(),
    "results": lambda x, n: {"a": n, "b": n + 1, "c": n / 3, "d": n * 2.5, "t": x},
    "tuple": lambda x, n: x * 2 if n in (3, 5) else x,
    "min, max": lambda x, n: x * 2.0 if min(n, 3) == 3 else x * max(n, 2) / 2.0,
    "sum": lambda x, n: x if sum([n, n, 1]) > 9 else -x,
    "None": lambda x, n: x if n is None or n == "a" or n == None else -x,  # noqa: E711
    "floor division": lambda x, n: x if n // 2 == 1 else -x,
    "decay": lambda x, n: x * (1 - 0.9**n),
    "mask": lambda x, n: x * (n > 2),
    "isinstance": lambda x, n: x * 2 if isinstance(n, int) and not isinstance(n, bool) else x,
    "chain": lambda x, n: x if 2 < n <= 7 else -x,
    "bool": lambda x, n: x if n else -x,
    "attribute": lambda x, n: x * getattr(n, "value", getattr(n, "key", 3.0)),
    "division by zero": lambda x, n: x / (1 / (n - 4)),
    "list": lambda x, n: x if [n] == [3] else -x,
    "enumerate": lambda x, n: apply(x, [layer for k, layer in enumerate(LAYERS) if k < n]),
    "copy": lambda x, n: x * copy.copy(n) * copy.deepcopy(n) * 1.0,
    "error": refused_above_8,
}
FLOAT_INPUTS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "arithmetic": lambda x, t: [
        x * t,
        x / t,
        t / x,
        t - x,
        x.abs() ** t,
        t**x if t > 0 else x,
        x.int() * t,
        x.half() * t,
        x.bfloat16() + t,
    ],
    "comparisons": lambda x, t: [x > t, x == t, x <= t, x.int() < t, torch.where(x > 0, x, t), x.masked_fill(x > 0, t)],
    "full": lambda x, t: [torch.full_like(x, t), torch.full((3,), t), torch.tensor(t), torch.tensor(t, dtype=torch.float64)],
    "in place": lambda x, t: [x.clone().fill_(t), x.clone().add_(t), x.clone().div_(t)],
    "scaled": lambda x, t: [torch.lerp(x, x + 1, t), torch.add(x, x, alpha=t), torch.addcmul(x, x, x, value=t)],
    "softmax": lambda x, t: (x / (abs(t) + 0.1)).softmax(-1),
    "polynomial": lambda x, t: x * (3 * t**2 - 2 * t**3) if t > 0 else x,
    "results": lambda x, t: (x, t, t * 2, -t, [t, {"a": t}]),
    "branch": lambda x, t: x if t > 0.4 else -x,
    "clipped": lambda x, t: x * max(t, 0.5),
}
# Python, or code written in C, reads the value, so each value is a separate state.
READ: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "slice of a list": lambda x, n: apply(x, LAYERS[:n]),
    "range": lambda x, n: apply(x, [LAYERS[k % 4] for k in range(n)]),
    "slice of a tensor": lambda x, n: x[:, :n].sum(),
    "sizes": lambda x, n: torch.zeros(n).sum() + torch.arange(n).sum() + x,
    "integers": lambda x, n: x.int() * n,
    "hash": lambda x, n: x * 2 if n in {3, 5} else x * {1: 2.0, 4: 4.0}.get(n, 1.0),
    "text": lambda x, n: {f"k{n}": x},
    "math": lambda x, n: x * math.sqrt(n) if math.cos(n) > 0 else x,
    "type": lambda x, n: x * 2 if type(n) is int else x,
    "bits": lambda x, n: x if n & 1 else -x,
    "divmod": lambda x, n: x * 2 if divmod(n, 3)[1] == 0 else x,
    "dimension": lambda x, n: x.sum(n % 2).roll(n, 0),
    "index": lambda x, n: LAYERS[n % 4](x) + x[n % 3],
    "attribute of numbers": lambda x, n: x * n.real * n.bit_length(),
    "caught": caught,
    "loop": count_up,
}
FLOAT_READ: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "settings of ops": lambda x, t: [F.leaky_relu(x, t), F.elu(x, t), F.layer_norm(x, (4,), eps=abs(t)), x.clamp(max=t)],
    "rounding": lambda x, t: x[int(t) if 0 < t < 3 else 0] * (round(t) + math.floor(t) if abs(t) < 9 else 1),
    "smoothing": lambda x, t: F.cross_entropy(x, torch.tensor([0, 1, 2]), label_smoothing=min(max(t, 0.0), 1.0)),
    "loss": lambda x, t: F.smooth_l1_loss(x, x + 1, beta=abs(t)),
    "norm": lambda x, t: torch.norm(x, p=abs(t)),
    "range": lambda x, t: [torch.linspace(0, t if abs(t) < 9 else 1.0, 5), torch.arange(0.0, t if 0 < t < 9 else 1.0, 0.5)],
    "scale": lambda x, t: F.interpolate(x[None, None], scale_factor=1 + (t if 0 < t < 2 else 0.0), mode="nearest"),
    "attention": lambda x, t: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=t),
    "division": lambda x, t: [x // t, x % t, torch.div(x, t, rounding_mode="floor"), torch.fmod(x, t)],
    "exp": lambda x, t: x / (1 + math.exp(-t)),
}


def outcome(step: Callable[..., Any], x: torch.Tensor, number: Any) -> Any:
    """Returns the result of a call, or the type and the text of its exception."""
    try:
        return step(x, number)
    except Exception as error:
        return type(error), str(error)


def assert_equal(found: Any, expected: Any) -> None:
    """Asserts that types and values are equal; tensors and floats are equal up to rounding."""
    assert type(found) is type(expected)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected, equal_nan=True)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        assert_equal(list(found.values()), list(expected.values()))
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_equal(one, other)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6, nan_ok=True)
    else:
        assert found == expected


def eager_calls(function: Callable[..., Any], numbers: Sequence[Any]) -> int:
    """Compares all calls with eager mode. Returns the number of calls that ran in eager mode."""
    compiled = dynaxla.compile_step(function)
    before = metrics.snapshot().get("eager_steps", 0)
    for number in numbers:
        assert_equal(outcome(compiled, X, number), outcome(function, X, number))
    return int(metrics.snapshot().get("eager_steps", 0) - before)


@pytest.mark.sample(usual=6)
@pytest.mark.parametrize("name", INPUTS)
def test_integers_as_inputs(name: str) -> None:
    """The first two calls are observed, and the third shows that the number changes. Calls that raise run in eager mode."""
    assert eager_calls(INPUTS[name], INTEGERS) <= {"error": 8, "division by zero": 14}.get(name, 5)


@pytest.mark.sample(usual=6)
@pytest.mark.parametrize("name", FLOAT_INPUTS)
def test_floats_as_inputs(name: str) -> None:
    assert eager_calls(FLOAT_INPUTS[name], [*FLOATS, math.nan]) <= 8


@pytest.mark.sample(usual=8)
@pytest.mark.parametrize("name", READ)
def test_integers_that_are_read(name: str) -> None:
    eager_calls(READ[name], INTEGERS * 2)


@pytest.mark.sample(usual=5)
@pytest.mark.parametrize("name", FLOAT_READ)
def test_floats_that_are_read(name: str) -> None:
    eager_calls(FLOAT_READ[name], FLOATS * 2)


def test_integers_that_float64_cannot_represent() -> None:
    eager_calls(lambda x, n: torch.tensor(n) - 2**60, [2**60 + k for k in range(6)])
    eager_calls(lambda x, n: torch.tensor(n) + 0, [*range(6), 2**53 + 1, 2**60 + 1])


class Counters(SimpleNamespace):
    """Numbers in an object's attributes, in a list and in a dict."""


def counting(state: Any) -> Callable[..., Any]:
    def step(x: torch.Tensor, n: float) -> torch.Tensor:
        state.count += 1
        state.factor *= 0.9
        state.items[1] += state.count
        state.table["k"] = state.items[1] - state.count
        state.last = state.factor + n
        return x * state.factor

    return step


def swapping(state: Any) -> Callable[..., Any]:
    def step(x: torch.Tensor, n: float) -> torch.Tensor:
        state.factor, state.other = state.other, state.factor + n
        return x * state.factor

    return step


def removing(state: Any) -> Callable[..., Any]:
    def step(x: torch.Tensor, n: float) -> torch.Tensor:
        value = getattr(state, "last", 9.0)
        if not hasattr(state, "last"):
            state.last = float(n)
        elif n % 3 == 0:
            del state.last
        return x * value

    return step


def naming(state: Any) -> Callable[..., Any]:
    """Stores constants that depend on a counter, without other differences between programs."""

    def step(x: torch.Tensor, n: float) -> torch.Tensor:
        state.count += 1
        state.name = "odd" if state.count % 2 else "even"
        state.items[0] = state.count if state.count % 3 else 0
        return x * 2

    return step


def marking(state: Any) -> Callable[..., Any]:
    """Stores a number at each fourth call."""

    def step(x: torch.Tensor, n: float) -> torch.Tensor:
        state.count += 1
        if state.count % 4 == 1:
            state.last = state.count
        return x * 2

    return step


def dividing(state: Any) -> Callable[..., Any]:
    """Fails at the call with 7, after its first effect."""

    def step(x: torch.Tensor, n: float) -> torch.Tensor:
        state.count += 1
        state.other = 1 / (n - 7)
        return x * state.count

    return step


def fading(state: Any) -> Callable[..., Any]:
    def step(x: torch.Tensor, n: float) -> torch.Tensor:
        state.factor = min(2.0, state.factor + 0.15)
        return x.sin() * state.factor + x * (2 - state.factor) if state.factor < 2 else x.sin()

    return step


@pytest.mark.parametrize(
    ("make", "max_eager_calls"),
    [(counting, 4), (swapping, 4), (removing, 14), (fading, 5), (dividing, 12), (naming, 12), (marking, 6)],
    ids=["counting", "swapping", "removing", "fading", "dividing", "naming", "marking"],
)
def test_numbers_in_objects(make: Callable[[Any], Callable[..., Any]], max_eager_calls: int) -> None:
    states = [Counters(count=0, factor=1.0, other=2.0, last=0.5, items=[0, 0], table={"k": 0}) for _ in range(2)]
    eager, compiled = make(states[0]), dynaxla.compile_step(make(states[1]))
    before = metrics.snapshot().get("eager_steps", 0)
    for n in range(14):
        assert_equal(outcome(compiled, X, n), outcome(eager, X, n))
        assert_equal(vars(states[1]), vars(states[0]))
    assert metrics.snapshot().get("eager_steps", 0) - before <= max_eager_calls


def test_other_threads_see_plain_numbers() -> None:
    """A thread that reports progress, and copies the state, while the step is recorded."""
    state, observations, stop = Counters(count=0, factor=1.0), [], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            observations.append(
                (f"{state.count:05d}", state.count + 1, int(state.factor), state.count > 3, copy.deepcopy(vars(state)), hash(state.count))
            )

    def step(x: torch.Tensor) -> torch.Tensor:
        state.count += 1
        state.factor *= 0.5
        return x * state.factor

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        compiled = dynaxla.compile_step(step)
        for _ in range(6):
            compiled(X)
    finally:
        stop.set()
        thread.join()
    assert state == Counters(count=6, factor=0.5**6)
    assert observations
    for text, following, _, _, copied, _ in observations:
        assert text.isdigit()
        assert pickle.loads(pickle.dumps((following, copied)))


def test_loops_over_numbers_make_few_programs() -> None:
    """Each iteration adds a condition, so each number needs its own program, and the step ends in eager mode."""
    assert eager_calls(count_up, range(400, 440)) >= 20
    before = metrics.snapshot()["compile"]
    assert eager_calls(count_up, range(40)) >= 20
    assert metrics.snapshot()["compile"] - before <= 12


def test_counter_in_a_closure() -> None:
    def make() -> Callable[..., Any]:
        count = 0

        def step(x: torch.Tensor) -> torch.Tensor:
            nonlocal count
            count += 1
            return x * (1 / count)

        return step

    eager, compiled = make(), dynaxla.compile_step(make())
    for _ in range(8):
        assert_equal(compiled(X), eager(X))


class Trainer:
    """A typical trainer: it counts, stores losses, accumulates gradients, and changes the learning rate by hand."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.losses: list[float] = []
        self.it, self.best = 0, math.inf

    def step(self, x: torch.Tensor, temperature: float) -> torch.Tensor:
        self.it += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 * min(1.0, self.it / 5, (30 - self.it) / 10)
        loss = (self.model(x) / temperature).square().mean()
        loss.backward()
        if self.it % 3 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss


def test_trainer() -> None:
    eager, compiled = Trainer(), Trainer()
    step = dynaxla.compile_step(compiled.step)
    before = metrics.snapshot().get("eager_steps", 0)
    for call in range(24):
        found, expected = step(X + call, 1 + call / 10), eager.step(X + call, 1 + call / 10)
        assert_equal(found, expected.detach())
        for trainer, loss in ((eager, expected), (compiled, found)):
            trainer.losses.append(loss.item())
            trainer.best = min(trainer.best, loss.item())
        assert compiled.it == eager.it
        for one, other in zip(compiled.model.parameters(), eager.model.parameters(), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert metrics.snapshot().get("eager_steps", 0) - before <= 12


SCHEDULERS: dict[str, tuple[int, Callable[[torch.optim.Optimizer], Any]]] = {
    "StepLR": (4, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 4)),
    "LinearLR": (5, lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 6)),
    "LambdaLR": (5, lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))),
    "CosineAnnealingLR": (12, lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)),
}


@pytest.mark.sample(usual=2)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_in_the_step(name: str) -> None:
    max_eager_calls, make = SCHEDULERS[name]
    trainers = [Trainer(), Trainer()]
    schedulers = [make(trainer.optimizer) for trainer in trainers]

    def step(trainer: Trainer, scheduler: Any, x: torch.Tensor) -> torch.Tensor:
        loss = trainer.model(x).square().mean()
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        scheduler.step()
        return loss.detach()

    compiled = dynaxla.compile_step(step)
    before = metrics.snapshot().get("eager_steps", 0)
    for _ in range(12):
        assert_equal(compiled(trainers[1], schedulers[1], X), step(trainers[0], schedulers[0], X))
        assert_equal(schedulers[1].get_last_lr(), schedulers[0].get_last_lr())
        assert schedulers[1].last_epoch == schedulers[0].last_epoch
    assert metrics.snapshot().get("eager_steps", 0) - before <= max_eager_calls


class Counted(torch.optim.Optimizer):
    """An Adam that counts its steps in Python."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(parameter), square=torch.zeros_like(parameter))
                state["step"] += 1
                state["mean"].mul_(first).add_(parameter.grad, alpha=1 - first)
                state["square"].mul_(second).addcmul_(parameter.grad, parameter.grad, value=1 - second)
                correction, other = 1 - first ** state["step"], 1 - second ** state["step"]
                parameter.addcdiv_(state["mean"], (state["square"].sqrt() / other**0.5).add_(1e-8), value=-group["lr"] / correction)


def test_optimizer_that_counts_in_python() -> None:
    models = [nn.Linear(4, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [Counted(model.parameters()) for model in models]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    compiled = dynaxla.compile_step(step)
    before = metrics.snapshot().get("eager_steps", 0)
    for _ in range(12):
        assert_equal(compiled(models[1], optimizers[1], X), step(models[0], optimizers[0], X))
        torch.testing.assert_close(models[1].weight, models[0].weight, rtol=1e-4, atol=1e-6)
    counts = [[state["step"] for state in optimizer.state.values()] for optimizer in optimizers]
    assert counts == [[12, 12], [12, 12]]
    assert metrics.snapshot().get("eager_steps", 0) - before <= 4


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.factor * 2, None


def test_numbers_in_backward_passes() -> None:
    linear = nn.Linear(4, 4)

    def step(x: torch.Tensor, n: int) -> Any:
        y = x.clone().requires_grad_()
        Scaled.apply(checkpoint(lambda z, factor: linear(z) * factor, y, n * 0.1, use_reentrant=False), n * 0.1 + 0.5).sum().backward()
        linear.zero_grad()
        return y.grad

    assert eager_calls(step, range(10)) <= 4


def test_more_numbers_than_are_traced() -> None:
    """A list of past losses that is shifted at each call, and a counter that changes since the second call."""
    state = Counters(count=0, items=[float(k) for k in range(300)])

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * state.items[0] + state.count

    compiled = dynaxla.compile_step(step)
    for _ in range(8):
        assert_equal(compiled(X), step(X))
        state.items = [*state.items[1:], state.items[0] + 0.5]
        state.count += 1


def test_step_that_prints_at_some_calls(capsys: pytest.CaptureFixture[str]) -> None:
    """Calls that print run in eager mode, and are not recorded again. After a few calls, all other calls replay a program."""

    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        if n % 5 == 0:
            print("call", n)
        return x * 2

    compiled = dynaxla.compile_step(step)
    before = metrics.snapshot()
    for n in range(31):
        assert_equal(compiled(X, n), X * 2)
    after = metrics.snapshot()
    assert after["eager_steps"] - before.get("eager_steps", 0) <= 10
    assert after["capture"] - before.get("capture", 0) <= 4
    assert capsys.readouterr().out.split() == [word for n in range(0, 31, 5) for word in ("call", str(n))]


CONVERSIONS: list[Callable[[torch.Tensor, Any], torch.Tensor]] = [
    *(lambda x, n: x.clone().fill_(n), lambda x, n: torch.full_like(x, n), lambda x, n: torch.full((2,), n, dtype=x.dtype)),
    *(lambda x, n: x.masked_fill(x > 1, n), lambda x, n: torch.where(x > 1, n, x), lambda x, n: x**n),
    *(lambda x, n: torch.add(x, x, alpha=n), lambda x, n: x.clone().sub_(x, alpha=n), lambda x, n: torch.addcmul(x, x, x, value=n)),
    *(lambda x, n: torch.addcdiv(x, x, x, value=n), lambda x, n: torch.lerp(x, x + 1, n), lambda x, n: torch._foreach_add([x], n)[0]),
]


def assign(x: torch.Tensor, n: Any) -> torch.Tensor:
    y = x.clone()
    y[0] = n
    return y


# Complex tensors cannot be compared; their large powers and sums with infinity differ in NaN.
NOT_COMPLEX = (3, 4, 5, 11)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (op, dtype)
        for op in range(len(CONVERSIONS) + 1)
        for dtype in (torch.float32, torch.float16, torch.int32, torch.complex64)
        if dtype != torch.complex64 or op not in NOT_COMPLEX
    ],
)
def test_ranges_of_dtypes(op: int, dtype: torch.dtype) -> None:
    """A number that the dtype cannot represent causes the same error as in eager mode; another one gives the same dtype."""
    function = [*CONVERSIONS, assign][op]
    x = torch.tensor([1, 2, 3]).to(dtype)
    compiled = dynaxla.compile_step(function)
    for number in (0.5, 0.25, 1.5, 2.0, 1e6, 1.0, 1e300, 0.75):
        try:
            expected = function(x, number)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0])):
                compiled(x, number)
        else:
            torch.testing.assert_close(compiled(x, number), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_of_rank_0(dtype: torch.dtype) -> None:
    """Numbers are float32 in arithmetic, and the result is rounded once, as in ATen."""

    def step(x: torch.Tensor, n: float) -> list[torch.Tensor]:
        return [x * n, x / n, x + n, n - x, n / x]

    compiled = dynaxla.compile_step(step)
    x = torch.tensor(1.7, dtype=dtype)
    for number in (0.3, 0.7, 1e6, 70000.0, 1e-5, 0.1):
        for found, expected in zip(compiled(x, number), step(x, number), strict=True):
            assert found.dtype == expected.dtype
            assert found == expected


def test_filled_tensor_has_memory_of_its_own() -> None:
    def step(x: torch.Tensor, number: float) -> torch.Tensor:
        y = torch.fill(x, number)
        y[0, 0] = 7
        return y

    compiled = dynaxla.compile_step(step)
    for number in (1.0, 2.0, 3.0, 4.0, 5.0):
        assert torch.equal(compiled(torch.zeros(2, 2), number), step(torch.zeros(2, 2), number))


def test_number_outside_the_range_of_a_new_tensor() -> None:
    compiled = dynaxla.compile_step(lambda x, number: x + torch.tensor(number, dtype=torch.uint8))
    for number in (1, 2, 3, 4, 5):
        assert compiled(torch.zeros(2), number).tolist() == [number, number]
    with pytest.raises(RuntimeError):
        compiled(torch.zeros(2), 300)
