"""Training loops as users write them."""

from __future__ import annotations

import collections
import copy
import itertools
import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from .program import Compile, plain, program


def mlp(*s, act=nn.Tanh):
    layers = []
    for a, b in itertools.pairwise(s):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*layers[:-1])


@program
def gan(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    g, d = mlp(4, 8, 2), mlp(2, 8, 1)
    og, od = torch.optim.Adam(g.parameters(), 0.01), torch.optim.Adam(d.parameters(), 0.01)

    @compile
    def step(z, x):
        od.zero_grad()
        f = g(z)
        ld = F.binary_cross_entropy_with_logits(d(x), torch.ones(len(x), 1)) + F.binary_cross_entropy_with_logits(
            d(f.detach()), torch.zeros(len(x), 1)
        )
        ld.backward()
        od.step()
        og.zero_grad()
        lg = F.binary_cross_entropy_with_logits(d(f), torch.ones(len(x), 1))
        lg.backward()
        og.step()
        return ld, lg

    r = []
    for i in range(8):
        torch.manual_seed(i)
        r += step(torch.randn(8, 4), torch.randn(8, 2))
    return plain(r)


@program
def gradient_penalty(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    d = mlp(2, 8, 1)
    optimizer = torch.optim.Adam(d.parameters(), 0.01)

    @compile
    def step(x):
        x = x.clone().requires_grad_()
        y = d(x).sum()
        (gr,) = torch.autograd.grad(y, x, create_graph=True)
        loss = ((gr.norm(dim=1) - 1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return plain([step(torch.ones(4, 2) * i) for i in range(1, 8)])


@program
def maml(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(1, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    @compile
    def step(tasks):
        optimizer.zero_grad()
        tot = 0.0
        for x, y in tasks:
            p = dict(model.named_parameters())
            loss = F.mse_loss(torch.func.functional_call(model, p, (x,)), y)
            g = torch.autograd.grad(loss, list(p.values()), create_graph=True)
            p = {k: v - 0.1 * gg for (k, v), gg in zip(p.items(), g, strict=False)}
            tot = tot + F.mse_loss(torch.func.functional_call(model, p, (x,)), y)
        tot.backward()
        optimizer.step()
        return tot

    r = []
    for i in range(7):
        torch.manual_seed(i)
        r.append(step([(torch.randn(4, 1), torch.randn(4, 1)) for _ in range(2)]))
    return plain(r)


@program
def sam(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    @compile
    def step(x, y):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            n = torch.stack([p.grad.norm() for p in model.parameters()]).norm() + 1e-12
            e = [p.grad * (0.05 / n) for p in model.parameters()]
            for p, ee in zip(model.parameters(), e, strict=False):
                p.add_(ee)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        with torch.no_grad():
            for p, ee in zip(model.parameters(), e, strict=False):
                p.sub_(ee)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    r = []
    for i in range(7):
        torch.manual_seed(i)
        r.append(step(torch.randn(4, 3), torch.randn(4, 1)))
    return plain(r)


@program
def ema_diffusion(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(3, 8, 3)
    e = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    @compile
    def step(x, t, noise):
        loss = F.mse_loss(model(x * t + noise * (1 - t)), noise)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            for a, b in zip(e.parameters(), model.parameters(), strict=False):
                a.lerp_(b, 0.1)
        return loss

    r = []
    for i in range(8):
        torch.manual_seed(i)
        r.append(step(torch.randn(4, 3), torch.rand(4, 1), torch.randn(4, 3)))
    return plain(r) + plain([p.sum() for p in e.parameters()])


@program
def ppo(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(3, 8, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    stats = collections.defaultdict(list)

    @compile
    def step(s, a, adv, old):
        d = torch.distributions.Categorical(logits=model(s))
        lp = d.log_prob(a)
        ratio = (lp - old).exp()
        loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean() - 0.01 * d.entropy().mean()
        kl = (old - lp).mean().item()
        stats["kl"].append(kl)
        if kl > 1.5:
            return loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    r = []
    for i in range(8):
        torch.manual_seed(i)
        r.append(step(torch.randn(6, 3), torch.randint(0, 2, (6,)), torch.randn(6), torch.randn(6)))
    return plain(r) + stats["kl"]


@program
def scaler(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    sc = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

    @compile
    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(x).float().square().mean()
        optimizer.zero_grad()
        sc.scale(loss).backward()
        sc.step(optimizer)
        sc.update()
        return loss

    return [*plain([step(torch.ones(4, 3) * i) for i in range(1, 9)]), sc.get_scale()]


@program
def scheduler_inside(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    s = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30)

    @compile
    def step(x):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        s.step()
        return loss

    return [*plain([step(torch.ones(4, 3)) for i in range(1, 12)]), s.get_last_lr()[0]]


@program
def metrics_dict(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(3, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    metrics = {"loss": torch.zeros(()), "n": 0, "correct": torch.zeros((), dtype=torch.long)}

    @compile
    def step(x, y):
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metrics["loss"] += loss.detach()
        metrics["correct"] += (out.argmax(1) == y).sum()
        metrics["n"] += len(y)
        return loss

    r = []
    for i in range(8):
        torch.manual_seed(i)
        r.append(step(torch.randn(6, 3), torch.randint(0, 4, (6,))))
    return plain(r) + plain([metrics["loss"], metrics["correct"], metrics["n"]])


@program
def tensor_metrics(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(3, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    metrics = {}

    @compile
    def step(x, y):
        out = model(x)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if "loss" not in metrics:
            metrics["loss"] = torch.zeros(())
        metrics["loss"] += loss.detach()
        metrics["last"] = loss.detach()
        return loss

    r = []
    for i in range(8):
        torch.manual_seed(i)
        r.append(step(torch.randn(6, 3), torch.randint(0, 4, (6,))))
    return plain(r) + plain(metrics.values())


@program
def lightning_like(compile: Compile) -> list[Any]:
    class L(nn.Module):
        def __init__(s):
            super().__init__()
            s.model = mlp(3, 8, 1)
            s.logged = {}
            s.global_step = 0
            s.opt = torch.optim.Adam(s.parameters(), 0.01)

        def log(s, k, v):
            s.logged[k] = v

        def training_step(s, x, i):
            loss = s.model(x).square().mean()
            s.log("loss", loss.detach())
            s.opt.zero_grad()
            loss.backward()
            s.opt.step()
            s.global_step += 1
            return loss

    torch.manual_seed(0)
    a = L()
    st = compile(a.training_step)
    return [*plain([st(torch.ones(4, 3) * i, i) for i in range(1, 9)]), a.global_step, a.logged["loss"].item()]


@program
def method_step(compile: Compile) -> list[Any]:
    class T:
        def __init__(s):
            torch.manual_seed(0)
            s.model = mlp(3, 8, 1)
            s.optimizer = torch.optim.RMSprop(s.model.parameters(), 0.01)

        def step(s, x):
            loss = s.model(x).square().mean()
            s.optimizer.zero_grad()
            loss.backward()
            s.optimizer.step()
            return {"loss": loss, "out": [x * 2, "a", 3]}

    t = T()
    st = compile(t.step)
    return [plain([result["loss"], *result["out"]]) for result in (st(torch.ones(4, 3) * i) for i in range(1, 9))]


@program
def accumulate(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(3, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)

    @compile
    def step(x, i):
        loss = model(x).square().mean() / 2
        loss.backward()
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return plain([step(torch.ones(4, 3) * i, i) for i in range(1, 13)])


@program
def muon(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(8, 8, 8)
    optimizer = (
        torch.optim.SGD(model.parameters(), 0.01)
        if not hasattr(torch.optim, "Muon")
        else torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01)
    )

    @compile
    def step(x):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return [round(v, 2) for v in plain([step(torch.ones(4, 8) * i) for i in range(1, 8)])]


@program
def hooks_late(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @compile
    def step(x):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    r = [step(torch.ones(4, 3)) for _ in range(5)]
    h = model[0].register_forward_hook(lambda a, b, c: c * 2)
    r += [step(torch.ones(4, 3)) for _ in range(4)]
    h.remove()
    r += [step(torch.ones(4, 3)) for _ in range(3)]
    model[0].weight.register_hook(lambda g: g * 0)
    r += [step(torch.ones(4, 3)) for _ in range(4)]
    return plain(r)


@program
def random_augment(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @compile
    def step(x):
        if random.random() < 0.5:
            x = x.flip(0) * 2
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return plain([step(torch.ones(4, 3) * i) for i in range(1, 12)])


@program
def early_stop_exception(compile: Compile) -> list[Any]:
    class Stop(Exception):
        pass

    torch.manual_seed(0)
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    n = [0]

    @compile
    def step(x):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        n[0] += 1
        if n[0] == 5:
            raise Stop
        return loss

    r = []
    for _i in range(9):
        try:
            r.append(step(torch.ones(4, 3)))
        except Stop:
            r.append("stop")
    return plain(r) + n


@program
def nan_guard(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @compile
    def step(x):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        if not torch.isfinite(loss):
            return None
        loss.backward()
        optimizer.step()
        return loss

    return plain([step(torch.full((4, 3), v)) for v in (1.0, 2.0, float("nan"), 3.0, float("inf"), 1.0, 2.0)])


@program
def swa(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    a = torch.optim.swa_utils.AveragedModel(model)

    @compile
    def step(x):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        a.update_parameters(model)
        return loss

    return plain([step(torch.ones(4, 3) * i) for i in range(1, 9)]) + plain([a.n_averaged, *[p.sum() for p in a.parameters()]])


@program
def vae(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    e, d = mlp(4, 8, 4), mlp(2, 8, 4)
    optimizer = torch.optim.Adam([*e.parameters(), *d.parameters()], 0.01)

    @compile
    def step(x, eps):
        mu, lv = e(x).chunk(2, 1)
        z = mu + eps * (lv / 2).exp()
        loss = (
            F.mse_loss(d(z), x)
            + torch.distributions.kl_divergence(torch.distributions.Normal(mu, (lv / 2).exp()), torch.distributions.Normal(0.0, 1.0)).mean()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    r = []
    for i in range(8):
        torch.manual_seed(i)
        r.append(step(torch.randn(4, 4), torch.randn(4, 2)))
    return plain(r)


@program
def iterator_arg(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    it = iter([torch.ones(4, 3) * i for i in range(12)])

    @compile
    def step():
        loss = model(next(it)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return plain([step() for i in range(10)])


@program
def custom_function(compile: Compile) -> list[Any]:
    class Sq(torch.autograd.Function):
        @staticmethod
        def forward(c, x):
            c.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(c, g):
            (x,) = c.saved_tensors
            return 2 * x * g * 1.5

    torch.manual_seed(0)
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @compile
    def step(x):
        loss = Sq.apply(model(x)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    return plain([step(torch.ones(4, 3) * i) for i in range(1, 8)])


@program
def mutate_arg(compile: Compile) -> list[Any]:
    @compile
    def step(x, h):
        h.mul_(0.5).add_(x)
        x.add_(1)
        return h.sum()

    h = torch.zeros(3)
    return plain([step(torch.ones(3) * i, h) for i in range(7)]) + plain([h])


@program
def freeze_unfreeze(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(3, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    @compile
    def step(x):
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    r = [step(torch.ones(4, 3)) for _ in range(4)]
    model[0].requires_grad_(False)
    r += [step(torch.ones(4, 3)) for _ in range(4)]
    model[0].requires_grad_(True)
    r += [step(torch.ones(4, 3)) for _ in range(4)]
    return plain(r)


@program
def per_sample(compile: Compile) -> list[Any]:
    torch.manual_seed(0)
    model = mlp(3, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @compile
    def step(x):
        p = dict(model.named_parameters())
        g = torch.func.vmap(torch.func.grad(lambda p, x: torch.func.functional_call(model, p, (x,)).square().mean()), (None, 0))(
            {k: v.detach() for k, v in p.items()}, x
        )
        for k, v in p.items():
            v.grad = (g[k] / g[k].flatten(1).norm(dim=1).clamp(min=1).view(-1, *[1] * (g[k].dim() - 1))).mean(0)
        optimizer.step()
        return sum(v.grad.sum() for v in p.values())

    return plain([step(torch.ones(4, 3) * i) for i in range(1, 8)])
