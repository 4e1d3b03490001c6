"""Steps whose Python code reads values of tensors, caches, counts, prints, passes tensors to threads, or stores them."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .program import PROGRAMS, Compile, plain, program


def inputs(n=6):
    return [torch.full((2,), float(2 ** (i + 1))) for i in range(n)]


def add_reading_step(name, read):
    def run(compile):
        @compile
        def step(x):
            try:
                s = read(x)
            except Exception:
                s = 1.0
            return x * s

        return plain([step(x) for x in inputs()])

    PROGRAMS[name] = run


add_reading_step("try item", lambda x: x.max().item())
add_reading_step("try int", lambda x: int(x.sum()))
add_reading_step("try tolist", lambda x: x.tolist()[0])
add_reading_step("try if", lambda x: 2.0 if x.sum() > 9 else 5.0)
add_reading_step("try all", lambda x: 2.0 if (x > 9).all() else 5.0)
add_reading_step("fstring", lambda x: float(f"{x[0]}".strip("tensor()")))
add_reading_step("numpy", lambda x: float(x.numpy()[0]))
add_reading_step("try len nonzero", lambda x: float(len(torch.nonzero(x > 9))))
add_reading_step("try format", lambda x: float(format(x[0], ".3f")))
add_reading_step("try allclose", lambda x: 2.0 if torch.allclose(x, torch.full((2,), 8.0)) else 7.0)
add_reading_step("try equal", lambda x: 2.0 if torch.equal(x, torch.full((2,), 8.0)) else 7.0)
add_reading_step("try in", lambda x: 2.0 if 8.0 in x else 7.0)
add_reading_step("try boolmask", lambda x: float(x[x > 9].numel()))
add_reading_step("try range", lambda x: float(sum(1 for _ in range(x[0].long()))))
add_reading_step("try index", lambda x: [1.0, 2.0, 3.0, 4.0, 5.0][x[0].long()])
add_reading_step("try round", lambda x: float(round(x[0].item(), 1)))
add_reading_step("try unique", lambda x: float(x.unique().shape[0] + x[0].item()))


@program
def suppress(compile: Compile) -> list[Any]:
    @compile
    def step(x):
        s = torch.tensor(1.0)
        with contextlib.suppress(Exception):
            s = torch.tensor(float(x.sum()))
        return x * s

    return plain([step(x) for x in inputs()])


@program
def getattr_default(compile: Compile) -> list[Any]:
    class Peaked:
        x = None

        @property
        def peak(self):
            if self.x.max().item() > 5:
                raise AttributeError("peak")
            return 3.0

    holder = Peaked()

    @compile
    def step(x):
        holder.x = x
        return x * getattr(holder, "peak", 1.0)

    return plain([step(x) for x in inputs()])


@program
def lru(compile: Compile) -> list[Any]:
    @functools.lru_cache
    def mask(n):
        return torch.ones(n, n).tril()

    @compile
    def step(x):
        return (mask(x.shape[0]) @ x).sum()

    r = [step(torch.ones(3, 2) * i) for i in range(4)] + [step(torch.ones(5, 2) * i) for i in range(4)]
    assert type(mask(3)) is type(mask(5)) is torch.Tensor
    return plain(r) + plain([mask(3), mask(5)])


@program
def cached_method(compile: Compile) -> list[Any]:
    class M(nn.Module):
        def __init__(s):
            super().__init__()
            s.layer = nn.Linear(3, 3)
            s.c = {}

        def mask(s, n):
            if n not in s.c:
                s.c[n] = torch.ones(n, n).tril()
            return s.c[n]

        def forward(s, x):
            return s.layer(s.mask(x.shape[0]) @ x)

    torch.manual_seed(0)
    model = M()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @compile
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    r = [step(torch.ones(n, 3)) for n in (2, 2, 4, 4, 2, 4, 3, 3, 3)]
    assert all(type(v) is torch.Tensor for v in model.c.values()), model.c
    return plain(r)


@program
def cached_property(compile: Compile) -> list[Any]:
    class M:
        @functools.cached_property
        def w(s):
            return torch.ones(3) * 2

    ms = [M() for _ in range(3)]

    @compile
    def step(x, i):
        return x * ms[i].w

    r = [step(torch.ones(3) * k, i) for i in range(3) for k in range(4)]
    assert all(type(model.w) is torch.Tensor for model in ms)
    return plain(r)


@program
def module_global_cache(compile: Compile) -> list[Any]:
    cache = {}

    def pos(n):
        try:
            return cache[n]
        except KeyError:
            cache[n] = torch.arange(n).float()
            return cache[n]

    @compile
    def step(x):
        return x * pos(x.shape[0])

    r = [step(torch.ones(n) * 2) for n in (2, 2, 2, 3, 3, 2, 3, 4)]
    assert all(type(v) is torch.Tensor for v in cache.values())
    return plain(r)


@program
def deque_append(compile: Compile) -> list[Any]:
    recent = collections.deque(maxlen=2)

    @compile
    def step(x):
        loss = x.sum()
        recent.append(loss)
        return loss + sum(recent)

    r = plain([step(x) for x in inputs()])
    return r + plain(list(recent))


@program
def deque_sum(compile: Compile) -> list[Any]:
    q = collections.deque(maxlen=3)

    @compile
    def step(x):
        q.append(x)
        return sum(q)

    return plain([step(x) for x in inputs()])


@program
def thread(compile: Compile) -> list[Any]:
    @compile
    def step(x):
        out = []
        t = threading.Thread(target=lambda: out.append(x * 2))
        t.start()
        t.join()
        return out[0] + x

    return plain([step(x) for x in inputs()])


@program
def pool(compile: Compile) -> list[Any]:
    with ThreadPoolExecutor(1) as ex:

        @compile
        def step(x):
            return ex.submit(lambda: x * 2).result() + ex.submit(torch.sum, x + 1).result()

        return plain([step(x) for x in inputs()])


@program
def queue_thread(compile: Compile) -> list[Any]:
    q, out = queue.Queue(), queue.Queue()

    def work():
        while (x := q.get()) is not None:
            out.put(x.sum() * 3)

    t = threading.Thread(target=work)
    t.start()

    @compile
    def step(x):
        q.put(x + 1)
        return out.get() * 2

    try:
        return plain([step(x) for x in inputs()])
    finally:
        q.put(None)
        t.join()


@program
def packed(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    g = nn.GRU(3, 4, batch_first=True)
    layer = nn.Linear(4, 1)
    ps = [*g.parameters(), *layer.parameters()]
    optimizer = torch.optim.Adam(ps, 0.01)

    @compile
    def step(x, n):
        p = nn.utils.rnn.pack_padded_sequence(x, n, batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(g(p)[0], batch_first=True)
        loss = layer(y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return plain([step(torch.ones(3, 5, 3) * i, torch.tensor([5, 3, 2])) for i in range(1, 6)]) + [p.sum().item() for p in ps]


@program
def packed_lstm(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    g = nn.LSTM(3, 4)
    ps = [*g.parameters()]
    optimizer = torch.optim.SGD(ps, 0.01)

    @compile
    def step(x, n):
        p = nn.utils.rnn.pack_padded_sequence(x, n.cpu().tolist(), enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(g(p)[0])
        loss = y.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return plain([step(torch.ones(5, 3, 3) * i, torch.tensor([5, 3, 2])) for i in range(1, 6)]) + [p.sum().item() for p in ps]


@program
def lbfgs(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), line_search_fn="strong_wolfe", max_iter=4)
    x = torch.randn(16, 3)
    y = x.sum(1, keepdim=True)

    @compile
    def step():
        def closure():
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    return plain([step() for _ in range(6)])


@program
def list_of_losses(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    ls = []

    @compile
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ls.append(loss.item())
        return loss

    r = plain([step(torch.ones(4, 3) * i) for i in range(8)])
    return r + ls


@program
def prints(compile: Compile) -> list[Any]:
    n = [0]
    lines = []
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    @compile
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        n[0] += 1
        if n[0] % 3 == 0:
            lines.append(f"{n[0]} {loss.item():.4f}")
        return loss

    r = plain([step(torch.ones(4, 3) * i) for i in range(10)])
    return r + lines + n


@program
def folds(compile: Compile) -> list[Any]:
    @compile
    def step(model, optimizer, x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    r = []
    for seed in range(3):
        torch.manual_seed(seed)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        r += [step(model, optimizer, torch.ones(4, 3) * i) for i in range(5)]
        r += [optimizer.state[p]["momentum_buffer"].sum() for p in model.parameters()]
    return plain(r)


@program
def autocast_outside(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @compile
    def step(x):
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        r = [step(torch.ones(4, 3)) for i in range(5)]
        r.append(model(torch.ones(1, 3)).float().sum())
    return plain(r)


@program
def scheduler(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.NAdam(model.parameters(), 0.01)
    s = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    @compile
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    r = []
    for i in range(8):
        r.append(step(torch.ones(4, 3) * i))
        s.step()
    return plain(r)


@program
def environ(compile: Compile) -> list[Any]:

    @compile
    def step(x):
        return x * float(os.environ.get("T50", "1"))

    r = []
    for i, x in enumerate(inputs()):
        os.environ["T50"] = str(i)
        r.append(step(x))
    return plain(r)


@program
def list_of_results(compile: Compile) -> list[Any]:
    results = []

    @compile
    def step(x):
        results.append(x * 2)
        return x.sum()

    r = plain([step(x) for x in inputs()])
    return r + plain(results)


@program
def running_attr(compile: Compile) -> list[Any]:
    class S:
        total = torch.zeros(2)
        count = 0

    s = S()

    @compile
    def step(x):
        s.total = s.total + x
        s.count += 1
        return s.total / s.count

    return [*plain([step(x) for x in inputs()]), s.count]


@program
def subclass_state(compile: Compile) -> list[Any]:
    class Q(torch.Tensor):
        @staticmethod
        def __new__(cls, data):
            return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32, strides=data.stride())

        def __init__(self, data):
            self.data_ = data

        def __tensor_flatten__(self):
            return ["data_"], None

        @classmethod
        def __tensor_unflatten__(cls, inner, meta, size, stride):
            return cls(inner["data_"])

        def deq(self):
            return self.data_.float()

        __torch_function__ = torch._C._disabled_torch_function_impl

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            if func is torch.ops.aten.copy_.default and isinstance(args[0], Q):
                args[0].data_.copy_(
                    (args[1].deq() if isinstance(args[1], Q) else args[1])
                    .contiguous()
                    .to(torch.bfloat16)
                    .flatten()
                    .view(args[0].data_.shape)
                )
                return args[0]

            def u(t):
                return t.deq() if isinstance(t, Q) else t

            return func(*torch.utils._pytree.tree_map(u, args), **torch.utils._pytree.tree_map(u, kwargs))

    class Opt(torch.optim.Optimizer):
        def __init__(s, ps):
            super().__init__(ps, dict(lr=0.1))

        @torch.no_grad()
        def step(s):
            for g in s.param_groups:
                for p in g["params"]:
                    if p.grad is None:
                        continue
                    st = s.state[p]
                    if not st:
                        st["m"] = Q(torch.zeros_like(p, dtype=torch.bfloat16))
                    m = st["m"].float() if not isinstance(st["m"], Q) else st["m"].deq()
                    m = m * 0.9 + p.grad
                    st["m"].copy_(m)
                    p.add_(m, alpha=-g["lr"])

    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = Opt(model.parameters())

    @compile
    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return plain([step(torch.ones(4, 3)) for i in range(6)])
